"""Viewer of trajectories as an interactive page, and as tables and text in the terminal.

The viewer's folder has the page, its scripts and style, and the data of runs in blocks that the browser loads on demand.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table
from rich.text import Text

from trial_ray.adapters.adapter import ACTION_CLASSES
from trial_ray.errors import UserInputError
from trial_ray.files import Json, partial_of, visible, write_folder, write_json
from trial_ray.reports import ASSETS, render
from trial_ray.runs.reader import RecordedRun
from trial_ray.runs.recorded_trajectory import RecordedTrajectory, RecordedTurn, TokenTexts

MARK = "trial_ray_viewer.json"
"""File that identifies the folder of a viewer; only such a folder is replaced."""
MAX_IN_BLOCK = 100
"""Maximum number of trajectories in a block of data; the page loads a block when it shows one of the block's trajectories."""
MAX_TOKENS_IN_BLOCK = 20_000
"""Number of response tokens at which a block of data ends, even if it has fewer than :data:`MAX_IN_BLOCK` trajectories."""
MAX_IN_INDEX = 2000
"""Maximum number of trajectories in a file of the index; the page lists the trajectories once the first file is loaded."""
MIN_FULL_TINT = {"gap": 0.01, "ratio": 0.01, "advantage": 0.1}
"""Lower bound of the magnitude drawn in the strongest colour, by the quantity that colours tokens.

It keeps rounding errors almost colourless. The quantities are the hindsight log-ratio (``gap``, in nats), the logarithm
of the importance ratio (``ratio``) and ``advantage``.
"""
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
    """Write a viewer of runs, replacing an older viewer; ``target`` never contains an incomplete viewer.

    Args:
        runs: runs to show.
        target: the viewer's folder.
        notes: sentences about missing data, which the page shows.
        progress: called after every iteration of a run.

    Raises:
        UserInputError: ``target`` contains something other than a viewer, or no iteration could be read.
    """
    replaced = (target / MARK).is_file()
    if target.exists() and not replaced and (not target.is_dir() or any(target.iterdir())):
        raise UserInputError(f"{target} exists and is not a viewer's folder. Name another one with --out.")
    all_notes, counts, new = list(notes), list[int](), partial_of(target) if replaced else target
    write_folder(new, lambda partial: counts.append(_write(runs, partial, all_notes, progress)))
    if replaced:
        os.replace(target, old := partial_of(target))
        os.replace(new, target)
        shutil.rmtree(old)
    return WrittenViewer(target / "index.html", counts[0], all_notes)


def _write(runs: Sequence[RecordedRun], folder: Path, notes: list[str], progress: Callable[[], None]) -> int:
    """Write the viewer's files, append sentences about missing data to ``notes``, and return the number of trajectories."""
    shutil.copytree(ASSETS / "viewer", folder)
    # The page's content security policy permits only scripts and styles with its nonce.
    page = folder / "index.html"
    page.write_text(page.read_text(encoding="utf-8").replace("NONCE", secrets.token_urlsafe(18)), encoding="utf-8")
    (folder / "data").mkdir()

    def save(kind: str, number: int, value: Any) -> None:
        (folder / f"data/{kind}-{number}.js").write_text(script(kind, number, value), encoding="ascii")

    rows: list[list[Any]] = []
    starts: list[int] = []
    untrained, magnitudes = 0, {name: list[np.ndarray]() for name in MIN_FULL_TINT}
    for block in _blocks(runs, notes, progress):
        text, detail = _Chunk(), _Chunk()
        for run, trajectory in block:
            tokens = runs[run].tokens
            text.trajectories.append([_texts(turn, tokens, text) for turn in trajectory.turns])
            detail.trajectories.append(_details(trajectory, tokens, detail))
            untrained += trajectory.advantage is None
            for turn in trajectory.turns:
                learner = turn.learner_logprobs
                ratio = None if learner is None else np.subtract(learner, turn.turn.logprobs)
                for name, values in (("gap", turn.gap), ("ratio", ratio), ("advantage", turn.advantage)):
                    if values is not None:
                        magnitudes[name].append(np.abs(np.atleast_1d(np.asarray(values, np.float32))))
        save("text", len(starts), text.content())
        save("detail", len(starts), detail.content())
        starts.append(len(rows))
        rows += [_row(run, trajectory) for run, trajectory in block]
    if not rows:
        raise UserInputError(" ".join(notes) or "There are no trajectories to show.")
    if untrained:
        notes.append(
            f"{untrained:,} of {len(rows):,} trajectories have no record of training: turn multipliers, gaps, advantages "
            "and learner log-probabilities were not recorded, or the trajectories were not trained on."
        )
    indices = range(0, len(rows), MAX_IN_INDEX)
    for number, start in enumerate(indices):
        save("index", number, rows[start : start + MAX_IN_INDEX])
    about = {
        "count": len(rows),
        "blocks": starts,
        "index_files": len(indices),
        "scales": {name: _full_tint(name, np.concatenate([[], *values])) for name, values in magnitudes.items()},
        "classes": list(ACTION_CLASSES),
        "runs": [visible(run.name) for run in runs],
        "notes": [visible(note) for note in notes],
    }
    save("about", 0, about)
    write_json(folder / MARK, {"schema_version": 1, "runs": [run.name for run in runs]})
    return len(rows)


def _blocks(
    runs: Sequence[RecordedRun], notes: list[str], progress: Callable[[], None]
) -> Iterator[list[tuple[int, RecordedTrajectory]]]:
    """Yield blocks of trajectories, each with the index of its run.

    For each iteration that cannot be read, a sentence is appended to ``notes``. ``progress`` is called after each iteration.
    """
    block: list[tuple[int, RecordedTrajectory]] = []
    tokens = 0
    for index, run in enumerate(runs):
        for iteration in run.recorded:
            try:
                recorded = run.read(iteration)
            except UserInputError as error:
                notes.append(f"{run.name}: iteration {iteration} is not shown. {error}")
                recorded = []
            for trajectory in recorded:
                block.append((index, trajectory))
                tokens += sum(len(turn.response_ids) for turn in trajectory.trajectory.turns)
                if len(block) >= MAX_IN_BLOCK or tokens >= MAX_TOKENS_IN_BLOCK:
                    yield block
                    block, tokens = [], 0
            progress()
    if block:
        yield block


def script(kind: str, number: int, value: Any) -> str:
    """Return a JavaScript call that passes ``value`` to the page as JSON text, which is never executed as code.

    The call contains only ASCII, ``<`` and ``&`` are escaped, and the JSON text is a single string literal.

    Args:
        kind: kind of the data, such as ``index`` or ``text``.
        number: number of the file among the files of this kind.
        value: the data.
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    text = text.replace("<", r"\u003c").replace("&", r"\u0026")
    literal = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"viewer.receive('{kind}',{number},'{literal}');\n"


class _Chunk:
    """Trajectories of a block; a text is stored as a list of indices of lines, and equal lines are stored once."""

    def __init__(self) -> None:
        self._indices: dict[str, int] = {}
        self.trajectories: list[Any] = []

    def add(self, text: str) -> list[int]:
        """Store the lines of ``text``, with control characters made visible, and return their indices."""
        return [self.index(line) for line in visible(text).split("\n")]

    def index(self, line: str) -> int:
        """Store a line and return its index."""
        return self._indices.setdefault(line, len(self._indices))

    def content(self) -> Json:
        """Return the lines and the trajectories as JSON values."""
        return {"lines": list(self._indices), "trajectories": self.trajectories}


def _texts(recorded: RecordedTurn, tokens: TokenTexts | None, chunk: _Chunk) -> list[list[int]]:
    turn = recorded.turn
    response = turn.response
    if tokens is not None and not response:
        response = tokens.opening(turn) + tokens.text(turn.response_ids.tolist())
    return [chunk.add(part) for part in (turn.observation, turn.action, response, turn.outcome)]


def _details(recorded: RecordedTrajectory, tokens: TokenTexts | None, chunk: _Chunk) -> Json:
    return {
        "error": visible(recorded.trajectory.error or ""),
        "solution": [visible(action) for action in recorded.trajectory.solution],
        "turns": [
            _numbers(turn)
            | _prompts(turn, tokens, chunk)
            | {"place": turn.turn.call.place(index) if turn.turn.call else ""}
            for index, turn in enumerate(recorded.turns)
        ],
    }


def _numbers(recorded: RecordedTurn) -> Json:
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


def _prompts(recorded: RecordedTurn, tokens: TokenTexts | None, chunk: _Chunk) -> Json:
    if tokens is None or not len(recorded.turn.response_ids):
        sent = recorded.message_text
        prompt = [chunk.add(sent), chunk.add("")] if sent else None
        return {"opened": "", "prompt": prompt, "evidence": None, "tokens": None}
    turn, opened = recorded.turn, tokens.opening(recorded.turn)
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
    return max(round(float(np.quantile(values, FULL_TINT_QUANTILE)), 6), MIN_FULL_TINT[name])


def _row(run: int, recorded: RecordedTrajectory) -> list[Any]:
    """Return the values of a trajectory in the order of ``FIELDS`` in ``assets/viewer/data.js``."""
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
    """Round numbers to four decimals; non-finite numbers become ``None``, because JSON cannot represent them."""
    if values is None:
        return None
    array = np.round(np.asarray(values, np.float64), 4)
    # NumPy's stubs do not cover arrays of objects.
    return np.where(np.isfinite(array), array, None).tolist()  # type: ignore[call-overload]


MAX_CELL_LENGTH = 100


def list_trajectories(recorded: Sequence[RecordedTrajectory], title: str) -> Table:
    """Return a table with one row per trajectory."""
    successful = sum(trajectory.trajectory.success for trajectory in recorded)
    table = Table(title=f"{title}: {len(recorded)} trajectories, {successful} successful")
    for name in ("#", "task", "family", "turns", "return", "success", "ended", "advantage", "disagreement"):
        table.add_column(name, overflow="fold")
    for row in recorded:
        trajectory = row.trajectory
        cells = (
            str(row.number),
            trajectory.task_id,
            trajectory.family,
            str(len(trajectory.turns)),
            f"{trajectory.episode_return:g}",
            "yes" if trajectory.success else "",
            trajectory.error or trajectory.ended,
            "" if row.advantage is None else f"{row.advantage:.2f}",
            "" if row.disagreement is None else f"{row.disagreement:.4f}",
        )
        table.add_row(*(Text(visible(cell).replace("\n", " ")[:MAX_CELL_LENGTH]) for cell in cells))
    return table


def print_trajectory(recorded: RecordedTrajectory, tokens: TokenTexts | None) -> Text:
    """Return the text of one trajectory: prompt, response and recorded values of every turn.

    Args:
        recorded: the trajectory.
        tokens: decoder of the run's tokens, or ``None`` to omit prompts and responses.
    """
    return Text(render("trajectory.txt.jinja", recorded=recorded, tokens=tokens, visible=visible))
