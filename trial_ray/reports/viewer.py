"""The viewer's folder: the page, its scripts and style, and the data of one or two runs in chunks that a browser loads."""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from trial_ray.environments.adapter import ACTION_CLASSES
from trial_ray.errors import UserInputError
from trial_ray.files import partial_of, visible, write_folder
from trial_ray.reports.recorded import RecordedTrajectory, TokenTexts, TrainedTurn, disagreement
from trial_ray.reports.run import RecordedRun
from trial_ray.rollout.trajectory import Turn

MARK = "trial_ray_viewer.json"
"""Marks a viewer's folder, which may be replaced."""
ASSETS = ("data.js", "list.js", "reader.js", "viewer.js", "viewer.css")


@dataclass(frozen=True, slots=True)
class WrittenViewer:
    """Files that were written.

    Attributes:
        page: the file to open.
        trajectories: how many can be read on it.
        notes: what is missing, in sentences; the page shows them too.
    """

    page: Path
    trajectories: int
    notes: list[str]


def write_viewer(
    runs: Sequence[RecordedRun], target: Path, notes: Sequence[str] = (), progress: Callable[[], None] = lambda: None
) -> WrittenViewer:
    """Write the viewer of some runs, in place of an older one at ``target``; it appears complete or not at all.

    Args:
        runs: what to show.
        target: the viewer's folder.
        notes: what is known to be missing.
        progress: called after every iteration.

    Raises:
        UserInputError: ``target`` holds something else than a viewer, or no iteration could be read.
    """
    if target.exists() and not (target / MARK).is_file() and (not target.is_dir() or any(target.iterdir())):
        raise UserInputError(f"{target} exists and is no viewer's folder. Name another one with --out.")
    replaced = (target / MARK).is_file()
    said, counted, new = list(notes), [0], partial_of(target) if replaced else target
    write_folder(new, lambda partial: counted.append(_write(runs, partial, said, progress)))
    if replaced:
        old = new.with_suffix(".old")
        os.replace(target, old)
        os.replace(new, target)
        shutil.rmtree(old, ignore_errors=True)
    return WrittenViewer(target / "index.html", counted[-1], said)


def _write(runs: Sequence[RecordedRun], folder: Path, notes: list[str], progress: Callable[[], None]) -> int:
    """Write the files; returns the number of trajectories, and adds to the notes."""
    (folder / "data").mkdir(parents=True)
    writer = ChunkWriter(folder / "data")
    for index, run in enumerate(runs):
        for iteration in run.recorded:
            try:
                recorded = run.read(iteration)
            except UserInputError as error:
                notes.append(f"{run.name}: iteration {iteration} is not shown. {error}")
                recorded = []
            for each in recorded:
                writer.add(index, each, run.tokens)
            progress()
    if not writer.count:
        raise UserInputError(" ".join(notes) or "There are no trajectories to show.")
    described = writer.close()
    if writer.untrained:
        notes.append(
            f"{writer.untrained:,} of {writer.count:,} trajectories have no record of training: turn multipliers, gaps, advantages "
            "and learner log-probabilities were not recorded, or the trajectories were not trained on."
        )
    described |= {"runs": [visible(run.name) for run in runs], "notes": [visible(note) for note in notes]}
    (folder / "data" / "about-0.js").write_text(script("about", 0, described), encoding="ascii")
    _write_page(folder)
    (folder / MARK).write_text(json.dumps({"schema_version": 1, "runs": [run.name for run in runs]}), encoding="utf-8")
    return writer.count


def _write_page(folder: Path) -> None:
    """The page with a fresh nonce, without which no script or style runs on it."""
    assets = resources.files("trial_ray.reports") / "assets/viewer"
    page = (assets / "index.html").read_text(encoding="utf-8").replace("NONCE", secrets.token_urlsafe(18))
    (folder / "index.html").write_text(page, encoding="utf-8")
    for name in ASSETS:
        (folder / name).write_text((assets / name).read_text(encoding="utf-8"), encoding="utf-8")


MOST_IN_BLOCK = 100
MOST_TOKENS_IN_BLOCK = 20_000
"""Trajectories and response tokens after which a block ends; a block is what a click loads."""
MOST_IN_INDEX = 2000
"""Trajectories in a file of the index; the first one has to be there before anything is shown."""
FULL_TINT_AT_LEAST = {"gap": 0.01, "ratio": 0.01, "advantage": 0.1}
"""Magnitudes (nats; of the logarithm; of the advantage) below which no tint is full: rounding is not to look like a finding."""
FULL_TINT_QUANTILE = 0.98
NOT_TRAINED = TrainedTurn(None, None, None, None, None, None)


def script(kind: str, number: int, value: Any) -> str:
    """A call that hands ``value`` to the page as text, so that nothing of it is ever read as a program.

    Only ASCII is written, ``<`` and ``&`` are escaped, and the text is a single string literal.
    """
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    text = text.replace("<", r"\u003c").replace("&", r"\u0026")
    literal = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"viewer.receive('{kind}',{number},'{literal}');\n"


class LineTable:
    """Texts as lists of indices of lines; each distinct line is kept once."""

    def __init__(self) -> None:
        self._indices: dict[str, int] = {}

    def add(self, text: str) -> list[int]:
        """Indices of the lines of ``text``, made visible."""
        return [self.index(line) for line in visible(text).split("\n")]

    def index(self, line: str) -> int:
        """Index of a line."""
        return self._indices.setdefault(line, len(self._indices))

    def lines(self) -> list[str]:
        """Every line by its index."""
        return list(self._indices)


class ChunkWriter:
    """Writes the data of a viewer, trajectory by trajectory.

    Args:
        folder: an empty folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.count = 0
        self.untrained = 0
        self._magnitudes: dict[str, list[np.ndarray]] = {name: [] for name in FULL_TINT_AT_LEAST}
        self._block_starts: list[int] = []
        self._index_files = 0
        self._start_block()
        self._start_index()

    def add(self, run: int, recorded: RecordedTrajectory, tokens: TokenTexts | None) -> None:
        """Write one trajectory.

        Args:
            run: index of its run.
            recorded: the trajectory.
            tokens: texts of the run's tokens.
        """
        turns = list(zip(recorded.trajectory.turns, recorded.trained, recorded.classes, strict=True))
        texts = [None if tokens is None else tokens.texts(turn.response_ids.tolist()) for turn, _, _ in turns]
        opened = ["" if tokens is None else tokens.opened(turn) for turn, _, _ in turns]
        self._texts.append(
            [
                [
                    self._text_lines.add(part)
                    for part in (turn.observation, turn.action, begun + "".join(response or ()), turn.outcome)
                ]
                for (turn, _, _), response, begun in zip(turns, texts, opened, strict=True)
            ]
        )
        self._details.append(
            {
                "seed": recorded.trajectory.seed,
                "error": visible(recorded.trajectory.error or ""),
                "solution": [visible(action) for action in recorded.trajectory.solution],
                "turns": [
                    self._detail(turn, trained or NOT_TRAINED, name, tokens, response) | {"opened": visible(begun)}
                    for (turn, trained, name), response, begun in zip(turns, texts, opened, strict=True)
                ],
            }
        )
        self._rows.append(self._row(run, recorded))
        self._tokens += sum(len(turn.response_ids) for turn, _, _ in turns)
        self.untrained += all(trained is None for trained in recorded.trained)
        self.count += 1
        if len(self._texts) >= MOST_IN_BLOCK or self._tokens >= MOST_TOKENS_IN_BLOCK:
            self._end_block()
        if len(self._rows) >= MOST_IN_INDEX:
            self._end_index()

    def close(self) -> dict[str, Any]:
        """Write what is left; returns what the page has to know of the files."""
        if self._texts:
            self._end_block()
        if self._rows:
            self._end_index()
        return {
            "count": self.count,
            "blocks": self._block_starts[:-1],
            "index_files": self._index_files,
            "scales": {name: self._full_tint(name) for name in FULL_TINT_AT_LEAST},
            "classes": list(ACTION_CLASSES),
        }

    def _full_tint(self, name: str) -> float | None:
        values = np.concatenate([np.empty(0), *self._magnitudes[name]])
        values = values[np.isfinite(values)]
        return (
            max(round(float(np.quantile(values, FULL_TINT_QUANTILE)), 6), FULL_TINT_AT_LEAST[name])
            if len(values)
            else None
        )

    def _detail(
        self, turn: Turn, trained: TrainedTurn, name: str, tokens: TokenTexts | None, response: list[str] | None
    ) -> dict[str, Any]:
        self._measure(turn, trained)
        add = self._detail_lines.add
        prompt, evidence = None, None
        if tokens is not None:
            before, after = ("".join(tokens.texts(part)) for part in trained.split_prompt(turn))
            prompt = [add(before), add(after.removesuffix(tokens.opened(turn)))]
            if trained.evidence_ids is not None:
                evidence = add("".join(tokens.texts(trained.evidence_ids)))
        return {
            "class": ACTION_CLASSES.index(name) if name else None,
            "reward": _finite(turn.reward),
            "valid": turn.valid,
            "understood": not turn.invalid_action,
            "finish": turn.finish_reason,
            "cut": turn.prompt_cut,
            "version": turn.weight_version,
            "prompt_tokens": len(turn.prompt_ids),
            "prompt": prompt,
            "evidence": evidence,
            "tokens": None if response is None else [self._detail_lines.index(visible(text)) for text in response],
            "ids": turn.response_ids.tolist(),
            "engine": _rounded(turn.logprobs),
            "learner": _rounded(trained.learner_logprobs),
            "gap": _rounded(trained.gap),
            "weight": _finite(trained.turn_weight),
            "score": _finite(trained.turn_score),
            "advantage": _finite(trained.advantage),
        }

    def _measure(self, turn: Turn, trained: TrainedTurn) -> None:
        learner = trained.learner_logprobs
        ratio = None if learner is None else np.asarray(learner) - turn.logprobs
        for name, values in (("gap", trained.gap), ("ratio", ratio), ("advantage", trained.advantage)):
            if values is not None:
                self._magnitudes[name].append(np.abs(np.atleast_1d(np.asarray(values, np.float32))))

    def _row(self, run: int, recorded: RecordedTrajectory) -> list[Any]:
        trajectory = recorded.trajectory
        names = (trajectory.environment, trajectory.task_id, trajectory.family, trajectory.ended)
        classes = sum(1 << ACTION_CLASSES.index(name) for name in set(recorded.classes) if name)
        return [
            run,
            recorded.iteration,
            recorded.number,
            *(self._names.index(visible(name).replace("\n", "␊")) for name in names),
            int(trajectory.success),
            len(trajectory.turns),
            _finite(trajectory.episode_return),
            _finite(recorded.advantage),
            _finite(disagreement(recorded.trained, trajectory.success)),
            classes,
            self._names.index(recorded.group_id),
            recorded.rollout_index,
        ]

    def _start_block(self) -> None:
        self._block_starts.append(self.count)
        self._text_lines, self._detail_lines = LineTable(), LineTable()
        self._texts: list[Any] = []
        self._details: list[Any] = []
        self._tokens = 0

    def _end_block(self) -> None:
        number = len(self._block_starts) - 1
        self._write("text", number, {"lines": self._text_lines.lines(), "turns": self._texts})
        self._write("detail", number, {"lines": self._detail_lines.lines(), "trajectories": self._details})
        self._start_block()

    def _start_index(self) -> None:
        self._names = LineTable()
        self._rows: list[list[Any]] = []

    def _end_index(self) -> None:
        self._write("index", self._index_files, {"names": self._names.lines(), "rows": self._rows})
        self._index_files += 1
        self._start_index()

    def _write(self, kind: str, number: int, value: Any) -> None:
        (self._folder / f"{kind}-{number}.js").write_text(script(kind, number, value), encoding="ascii")


def _finite(value: float | None) -> float | None:
    """For JSON, which has no NaN: four decimals, or nothing."""
    return round(float(value), 4) if value is not None and math.isfinite(value) else None


def _rounded(values: Sequence[float] | np.ndarray | None) -> list[float | None] | None:
    if values is None:
        return None
    array = np.asarray(values, np.float64)
    if np.isfinite(array).all():
        found: list[float | None] = np.round(array, 4).tolist()
        return found
    return [_finite(value) for value in array.tolist()]
