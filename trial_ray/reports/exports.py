"""Recorded trajectories for other tools: documents of the Agent Trajectory Interchange Format (ATIF), or for ``datasets``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trial_ray.errors import UserInputError
from trial_ray.files import escaped, finite, require_new_folder, write_folder
from trial_ray.learner.recording import TRAINING_SCHEMA
from trial_ray.reports.recorded import RecordedTrajectory, TokenTexts, TrainedTurn
from trial_ray.reports.records import RunRecord
from trial_ray.rollout.recording import SCHEMA as RECORDED
from trial_ray.rollout.trajectory import Turn
from trial_ray.version import __version__

ATIF_VERSION = "ATIF-v1.7"
NOTES = (
    "Step 1 is what the environment showed first. metrics.prompt_token_ids of a step is the whole prompt as the engine got it, "
    "since each prompt stands alone; completion_token_ids and logprobs are the engine's. extra.action was sent to the environment."
)


def write_atif(run: RunRecord, recorded: Iterable[Sequence[RecordedTrajectory]], folder: Path) -> int:
    """Write ``iteration=NUMBER/NUMBER.json`` for every trajectory with at least one turn, and return how many there are.

    Args:
        run: names method and model, and decodes responses.
        recorded: trajectories by iteration.
        folder: to write into; made here.
    """
    count = 0
    folder.mkdir(parents=True)
    for trajectories in recorded:
        for each in trajectories:
            if each.trajectory.turns:
                target = folder / f"iteration={each.iteration:05d}" / f"{each.number:06d}.json"
                target.parent.mkdir(exist_ok=True)
                document = finite(atif_document(run, each))
                target.write_text(json.dumps(document, ensure_ascii=False, allow_nan=False), encoding="utf-8")
                count += 1
    return count


def atif_document(run: RunRecord, recorded: RecordedTrajectory) -> dict[str, Any]:
    """One trajectory with at least one turn as an ATIF document, of plain types.

    Texts are as they are stored: a lone surrogate is escaped (:func:`trial_ray.files.escaped`).
    """
    trajectory = recorded.trajectory
    turns = trajectory.turns
    about = ("environment", "task_id", "family", "seed", "success", "score", "ended", "error", "failed_by", "solution")
    first = {"step_id": 1, "source": "user", "message": escaped(turns[0].observation)}
    return {
        "schema_version": ATIF_VERSION,
        "session_id": f"{recorded.group_id}-{recorded.rollout_index}",
        "trajectory_id": f"{recorded.group_id}-{recorded.rollout_index}",
        "agent": {
            "name": "trial-ray",
            "version": __version__,
            **({"model_name": run.backbone} if run.backbone else {}),
            "extra": {"method": run.method, "run": escaped(run.name)},
        },
        "steps": [
            first,
            *(
                _step(run, number, turn, trained)
                for number, (turn, trained) in enumerate(zip(turns, recorded.trained, strict=True), start=2)
            ),
        ],
        "notes": NOTES,
        "final_metrics": {
            "total_prompt_tokens": sum(len(turn.prompt_ids) for turn in turns),
            "total_completion_tokens": sum(len(turn.response_ids) for turn in turns),
            "total_steps": len(turns) + 1,
            "extra": {"return": trajectory.episode_return},
        },
        "extra": {
            "iteration": recorded.iteration,
            "group_id": recorded.group_id,
            "rollout_index": recorded.rollout_index,
            **{name: _stored(getattr(trajectory, name)) for name in about},
        },
    }


def _step(run: RunRecord, number: int, turn: Turn, trained: TrainedTurn | None) -> dict[str, Any]:
    names = ("action", "valid", "invalid_action", "reward", "weight_version", "finish_reason", "prompt_cut")
    extra = {name: _stored(getattr(turn, name)) for name in names}
    if trained is not None:
        extra |= {name: getattr(trained, name) for name in _OF_UPDATE}
    response = turn.action if run.tokens is None else run.tokens.response(turn)
    return {
        "step_id": number,
        "source": "agent",
        "message": escaped(response),
        # The action is text for the environment and no call of a function, so its result names none.
        "observation": {"results": [{"content": escaped(turn.outcome)}]},
        "metrics": {
            "prompt_tokens": len(turn.prompt_ids),
            "completion_tokens": len(turn.response_ids),
            "prompt_token_ids": turn.prompt_ids.tolist(),
            "completion_token_ids": turn.response_ids.tolist(),
            "logprobs": turn.logprobs.tolist(),
        },
        "extra": extra,
    }


_FIELDS = {field.name: field for field in (*TRAINING_SCHEMA, *RECORDED)}
_FIELDS |= {
    name: pa.field(name, kind, metadata={"description": text})
    for name, kind, text in (
        ("iteration", pa.int32(), "training iteration"),
        ("episode_return", pa.float64(), "sum of rewards"),
        ("prompt", pa.string(), "the prompt as text, special tokens included; null without the run's tokenizer"),
        ("response", pa.string(), "the response as text, with the `<think>` that its prompt may end in; null likewise"),
    )
}
_OF_TURN = [
    "observation",
    "action",
    "outcome",
    "reward",
    "valid",
    "invalid_action",
    "finish_reason",
    "prompt_cut",
    "weight_version",
    "prompt_ids",
    "response_ids",
    "logprobs",
]
_OF_UPDATE = ("advantage", "turn_score", "turn_weight")
_OF_TRAJECTORY = [
    "environment",
    "task_id",
    "family",
    "seed",
    "success",
    "score",
    "episode_return",
    "ended",
    "error",
    "solution",
]
_TURN = ("prompt", "response", *_OF_TURN, *_OF_UPDATE)
_TRAJECTORY = ("iteration", "group_id", "rollout_index", *_OF_TRAJECTORY)
TURN = pa.struct([_FIELDS[name].remove_metadata() for name in _TURN])
SCHEMA = pa.schema([*(_FIELDS[name].remove_metadata() for name in _TRAJECTORY), ("turns", pa.list_(TURN))])
"""Columns of the Parquet files: a row a trajectory."""


def write_dataset(run: RunRecord, recorded: Iterable[Sequence[RecordedTrajectory]], folder: Path) -> int:
    """Write ``data/train-NUMBER.parquet`` for every iteration and ``README.md``, and return the number of trajectories.

    Args:
        run: names method and model, and decodes prompts and responses.
        recorded: trajectories by iteration.
        folder: to write into; made here.
    """
    count = 0
    (folder / "data").mkdir(parents=True)
    for trajectories in recorded:
        rows = [_row(each, run.tokens) for each in trajectories]
        if rows:
            target = folder / "data" / f"train-{trajectories[0].iteration:05d}.parquet"
            pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), target, compression="zstd")
            count += len(rows)
    (folder / "README.md").write_text(_card(run, count), encoding="utf-8")
    return count


def _row(recorded: RecordedTrajectory, tokens: TokenTexts | None) -> dict[str, Any]:
    trajectory = recorded.trajectory
    own = {"iteration": recorded.iteration, "group_id": recorded.group_id, "rollout_index": recorded.rollout_index}
    own |= {name: _stored(getattr(trajectory, name)) for name in _OF_TRAJECTORY}
    pairs = zip(trajectory.turns, recorded.trained, strict=True)
    return own | {"turns": [_turn(turn, trained, tokens) for turn, trained in pairs]}


def _turn(turn: Turn, trained: TrainedTurn | None, tokens: TokenTexts | None) -> dict[str, Any]:
    texts: dict[str, str | None] = {"prompt": None, "response": None}
    if tokens is not None:
        prompt = "".join(tokens.texts(turn.prompt_ids.tolist()))
        texts = {"prompt": escaped(prompt), "response": escaped(tokens.response(turn))}
    return {
        **{name: _stored(getattr(turn, name)) for name in _OF_TURN},
        **texts,
        **{name: None if trained is None else getattr(trained, name) for name in _OF_UPDATE},
    }


def _stored(value: Any) -> Any:
    if isinstance(value, tuple):
        return [escaped(text) for text in value]
    return escaped(value) if isinstance(value, str) else value


def _card(run: RunRecord, count: int) -> str:
    """The card, whose front matter names the files as the Hub's own cards do."""
    lines = ["---", "tags:", "- reinforcement-learning", "- agent", "- trial-ray", "configs:", "- config_name: default"]
    lines += ["  data_files:", "  - split: train", "    path: data/train-*.parquet"]
    lines += ["---", ""]
    policy = f" of `{escaped(run.backbone)}`" if run.backbone else ""
    lines += [f"# Trajectories of {escaped(run.name)}", ""]
    lines += [f"{count:,} rollouts{policy} in training with {run.method or 'trial-ray'}, one row each.", ""]
    lines += ['    datasets.load_dataset("FOLDER", split="train")', ""]
    lines += ["| column | meaning |", "| --- | --- |"]
    for prefix, names in (("", _TRAJECTORY), ("turns.", _TURN)):
        lines += [f"| `{prefix}{name}` | {_FIELDS[name].metadata[b'description'].decode()} |" for name in names]
    return "\n".join([*lines, ""])


Write = Callable[[RunRecord, Iterable[Sequence[RecordedTrajectory]], Path], int]
EXPORTS: dict[str, Write] = {"atif": write_atif, "datasets": write_dataset}
"""What writes each format into a folder that it makes, and returns the number of trajectories."""


def export_trajectories(run: RunRecord, format_name: str, folder: Path, notes: list[str]) -> int:
    """Write the run's trajectories into a new folder, which appears complete or not at all.

    Args:
        run: whose trajectories.
        format_name: a key of :data:`EXPORTS`.
        folder: must be new or empty.
        notes: takes a sentence for each iteration that cannot be read.

    Returns:
        How many trajectories were written.

    Raises:
        UserInputError: the folder holds something, or no trajectory could be read.
    """
    require_new_folder(folder)
    counted: list[int] = []

    def write(partial: Path) -> None:
        counted.append(EXPORTS[format_name](run, _readable(run, notes), partial))
        if not counted[-1]:
            raise UserInputError(" ".join(notes) or "There are no trajectories with a turn to export.")

    write_folder(folder, write)
    return counted[-1]


def _readable(run: RunRecord, notes: list[str]) -> Iterator[list[RecordedTrajectory]]:
    for iteration in run.recorded:
        try:
            yield run.read(iteration)
        except UserInputError as error:
            notes.append(f"{run.name}: iteration {iteration} is not exported. {error}")
