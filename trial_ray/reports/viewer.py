"""The viewer's folder: page, scripts and style, and the data of one or two runs in chunks that a browser loads."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trial_ray.adapters.adapter import ACTION_CLASSES
from trial_ray.errors import UserInputError
from trial_ray.files import partial_of, visible, write_folder
from trial_ray.reports.templates import ASSETS
from trial_ray.runs.reader import RecordedRun
from trial_ray.runs.recorded_trajectory import RecordedTrajectory, RecordedTurn, TokenTexts

MARK = "trial_ray_viewer.json"
"""File that marks a viewer's folder, which may be replaced."""
MOST_IN_BLOCK = 100
MOST_TOKENS_IN_BLOCK = 20_000
"""Number of trajectories or response tokens at which a block is complete; a click loads one block."""
MOST_IN_INDEX = 2000
"""Maximum number of trajectories in a file of the index; the page shows nothing before the first file is loaded."""
FULL_TINT_AT_LEAST = {"gap": 0.01, "ratio": 0.01, "advantage": 0.1}
"""Magnitudes (gap in nats; logarithm of the ratio; advantage) below which no tint is full, so rounding does not look like a
finding."""
FULL_TINT_QUANTILE = 0.98


class WrittenViewer(NamedTuple):
    """Result of :func:`write_viewer`.

    Attributes:
        page: the file to open.
        trajectories: number of trajectories in the viewer.
        notes: sentences about missing data; the page shows them too.
    """

    page: Path
    trajectories: int
    notes: list[str]


def write_viewer(
    runs: Sequence[RecordedRun], target: Path, notes: Sequence[str] = (), progress: Callable[[], None] = lambda: None
) -> WrittenViewer:
    """Write the viewer of some runs, replacing an older viewer; ``target`` never contains an incomplete viewer.

    Args:
        runs: runs to show.
        target: the viewer's folder.
        notes: sentences about data that are missing.
        progress: called after every iteration.

    Raises:
        UserInputError: ``target`` contains something other than a viewer, or no iteration could be read.
    """
    replaced = (target / MARK).is_file()
    if target.exists() and not replaced and (not target.is_dir() or any(target.iterdir())):
        raise UserInputError(f"{target} exists and is not a viewer's folder. Name another one with --out.")
    said, counted, new = list(notes), list[int](), partial_of(target) if replaced else target
    write_folder(new, lambda partial: counted.append(_write(runs, partial, said, progress)))
    if replaced:
        os.replace(target, old := partial_of(target))
        os.replace(new, target)
        shutil.rmtree(old)
    return WrittenViewer(target / "index.html", counted[0], said)


def _write(runs: Sequence[RecordedRun], folder: Path, notes: list[str], progress: Callable[[], None]) -> int:
    """Write the files; returns the number of trajectories, and adds to the notes."""
    shutil.copytree(ASSETS / "viewer", folder)
    # With a fresh nonce, without which no script or style runs on the page.
    page = folder / "index.html"
    page.write_text(page.read_text(encoding="utf-8").replace("NONCE", secrets.token_urlsafe(18)), encoding="utf-8")
    (folder / "data").mkdir()

    def save(kind: str, number: int, value: Any) -> None:
        (folder / f"data/{kind}-{number}.js").write_text(script(kind, number, value), encoding="ascii")

    rows: list[list[Any]] = []
    starts: list[int] = []
    untrained, magnitudes = 0, {name: list[np.ndarray]() for name in FULL_TINT_AT_LEAST}
    for block in _blocks(runs, notes, progress):
        text, detail = _Chunk(), _Chunk()
        for run, each in block:
            tokens = runs[run].tokens
            text.trajectories.append([_texts(turn, tokens, text) for turn in each.turns])
            detail.trajectories.append(_details(each, tokens, detail))
            untrained += each.advantage is None
            for turn in each.turns:
                learner = turn.learner_logprobs
                ratio = None if learner is None else np.subtract(learner, turn.turn.logprobs)
                for name, values in (("gap", turn.gap), ("ratio", ratio), ("advantage", turn.advantage)):
                    if values is not None:
                        magnitudes[name].append(np.abs(np.atleast_1d(np.asarray(values, np.float32))))
        save("text", len(starts), text.content())
        save("detail", len(starts), detail.content())
        starts.append(len(rows))
        rows += [_row(run, each) for run, each in block]
    if not rows:
        raise UserInputError(" ".join(notes) or "There are no trajectories to show.")
    if untrained:
        notes.append(
            f"{untrained:,} of {len(rows):,} trajectories have no record of training: turn multipliers, gaps, advantages "
            "and learner log-probabilities were not recorded, or the trajectories were not trained on."
        )
    indices = range(0, len(rows), MOST_IN_INDEX)
    for number, start in enumerate(indices):
        save("index", number, rows[start : start + MOST_IN_INDEX])
    about = {
        "count": len(rows),
        "blocks": starts,
        "index_files": len(indices),
        "scales": {name: _full_tint(name, np.concatenate([[], *found])) for name, found in magnitudes.items()},
        "classes": list(ACTION_CLASSES),
        "runs": [visible(run.name) for run in runs],
        "notes": [visible(note) for note in notes],
    }
    save("about", 0, about)
    (folder / MARK).write_text(json.dumps({"schema_version": 1, "runs": [run.name for run in runs]}), encoding="utf-8")
    return len(rows)


def _blocks(
    runs: Sequence[RecordedRun], notes: list[str], progress: Callable[[], None]
) -> Iterator[list[tuple[int, RecordedTrajectory]]]:
    """The trajectories with the indices of their runs; notes are added on iterations that cannot be read."""
    block: list[tuple[int, RecordedTrajectory]] = []
    tokens = 0
    for index, run in enumerate(runs):
        for iteration in run.recorded:
            try:
                recorded = run.read(iteration)
            except UserInputError as error:
                notes.append(f"{run.name}: iteration {iteration} is not shown. {error}")
                recorded = []
            for each in recorded:
                block.append((index, each))
                tokens += sum(len(turn.response_ids) for turn in each.trajectory.turns)
                if len(block) >= MOST_IN_BLOCK or tokens >= MOST_TOKENS_IN_BLOCK:
                    yield block
                    block, tokens = [], 0
            progress()
    if block:
        yield block


def script(kind: str, number: int, value: Any) -> str:
    """Return a call that passes ``value`` to the page as text, which is never executed as code.

    Only ASCII is written, ``<`` and ``&`` are escaped, and the text is a single string literal.
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    text = text.replace("<", r"\u003c").replace("&", r"\u0026")
    literal = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"viewer.receive('{kind}',{number},'{literal}');\n"


class _Chunk:
    """Trajectories of a block, with texts as lists of indices of lines; each distinct line is kept once."""

    def __init__(self) -> None:
        self._indices: dict[str, int] = {}
        self.trajectories: list[Any] = []

    def add(self, text: str) -> list[int]:
        """Indices of the lines of ``text``, made visible."""
        return [self.index(line) for line in visible(text).split("\n")]

    def index(self, line: str) -> int:
        """Index of a line."""
        return self._indices.setdefault(line, len(self._indices))

    def content(self) -> dict[str, Any]:
        """For the page."""
        return {"lines": list(self._indices), "trajectories": self.trajectories}


def _texts(recorded: RecordedTurn, tokens: TokenTexts | None, chunk: _Chunk) -> list[list[int]]:
    turn = recorded.turn
    response = "" if tokens is None else tokens.opened(turn) + tokens.text(turn.response_ids.tolist())
    return [chunk.add(part) for part in (turn.observation, turn.action, response, turn.outcome)]


def _details(recorded: RecordedTrajectory, tokens: TokenTexts | None, chunk: _Chunk) -> dict[str, Any]:
    return {
        "error": visible(recorded.trajectory.error or ""),
        "solution": [visible(action) for action in recorded.trajectory.solution],
        "turns": [_numbers(turn) | _prompts(turn, tokens, chunk) for turn in recorded.turns],
    }


def _numbers(recorded: RecordedTurn) -> dict[str, Any]:
    turn = recorded.turn
    trained = ("advantage", "turn_score", "turn_weight", "gap", "learner_logprobs")
    return {
        **{name: _rounded(getattr(recorded, name)) for name in trained},
        **{name: getattr(turn, name) for name in ("valid", "invalid_action", "finish_reason", "prompt_cut")},
        "class": ACTION_CLASSES.index(recorded.action_class) if recorded.action_class else None,
        "reward": _rounded(turn.reward),
        "prompt_tokens": len(turn.prompt_ids),
        "ids": turn.response_ids.tolist(),
        "logprobs": _rounded(turn.logprobs),
    }


def _prompts(recorded: RecordedTurn, tokens: TokenTexts | None, chunk: _Chunk) -> dict[str, Any]:
    if tokens is None:
        return {"opened": "", "prompt": None, "evidence": None, "tokens": None}
    turn, opened = recorded.turn, tokens.opened(recorded.turn)
    before, after = map(tokens.text, recorded.split_prompt())
    evidence = recorded.evidence_ids
    return {
        "opened": visible(opened),
        "prompt": [chunk.add(before), chunk.add(after.removesuffix(opened))],
        "evidence": None if evidence is None else chunk.add(tokens.text(evidence)),
        "tokens": [chunk.index(visible(text)) for text in tokens.texts(turn.response_ids.tolist())],
    }


def _full_tint(name: str, values: np.ndarray) -> float | None:
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    return max(round(float(np.quantile(values, FULL_TINT_QUANTILE)), 6), FULL_TINT_AT_LEAST[name])


def _row(run: int, recorded: RecordedTrajectory) -> list[Any]:
    """The values of FIELDS in data.js."""
    trajectory = recorded.trajectory
    names = (trajectory.environment, trajectory.task_id, trajectory.family, trajectory.ended)
    return [
        run,
        recorded.iteration,
        recorded.number,
        *(visible(name).replace("\n", "␊") for name in names),
        int(trajectory.success),
        len(trajectory.turns),
        *map(_rounded, (trajectory.episode_return, recorded.advantage, recorded.disagreement)),
        sum(1 << ACTION_CLASSES.index(name) for name in {turn.action_class for turn in recorded.turns} if name),
        recorded.rollout_index,
    ]


def _rounded(values: float | Sequence[float] | np.ndarray | None) -> Any:
    """Plain numbers of four decimals, for JSON, which has no NaN."""
    if values is None:
        return None
    array = np.round(np.asarray(values, np.float64), 4)
    # numpy's stubs do not know arrays of objects.
    return np.where(np.isfinite(array), array, None).tolist()  # type: ignore[call-overload]
