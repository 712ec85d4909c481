"""Trajectories as Parquet: one row per turn, ids and numbers exactly as they were sampled and rewarded.

Files lie in ``iteration=00012/`` folders, which pyarrow, pandas, DuckDB and Spark read as a partition column. Many env
runners write side by side: every file has a name of its own and appears whole or not at all. ``docs/trajectories.md``
describes every column.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pds
import pyarrow.parquet as pq

from trial_ray.errors import UserInputError
from trial_ray.rollout.trajectory import Trajectory, TrajectoryGroup, Turn

SCHEMA_VERSION = 4
"""Raised by one whenever a column changes its name, type or meaning."""

_VERSION_KEY = b"trial_ray.schema_version"
_IDS, _LOGPROBS = pa.list_(pa.int32()), pa.list_(pa.float32())

_TRAJECTORY_COLUMNS = (
    ("group_id", pa.string(), "the group of rollouts of one task; unique in the run"),
    ("rollout_index", pa.int32(), "index of the rollout in its group"),
    ("environment", pa.string(), "name of the run's environment that the rollout was played in"),
    ("task_id", pa.string(), "the environment's id of the task"),
    ("family", pa.string(), "the environment's family of the task"),
    ("seed", pa.int64(), "seed with which the rollout was reset"),
    ("success", pa.bool_(), "whether the environment was won"),
    ("score", pa.float64(), "the environment's score, 0 to 1"),
    ("ended", pa.string(), "`terminated`, `turn_limit`, `prompt_limit` or `failed`"),
    ("error", pa.string(), "for `failed`: which error; else null"),
    ("solution", pa.list_(pa.string()), "the environment's own solution of the task; empty where it knows none"),
)
_TURN_COLUMNS = (
    ("prompt_ids", _IDS, "the ordinary prompt as sent to the engine, `[P]`"),
    ("response_ids", _IDS, "the response as sampled, stop token included, `[y]`"),
    ("logprobs", _LOGPROBS, "behaviour log-probability of each response token in nats, `[y]`"),
    ("weight_version", pa.int64(), "version of the weights that sampled the response"),
    ("insert_at", pa.int32(), "index in `prompt_ids` before which evidence is inserted"),
    ("observation", pa.string(), "what the environment showed before the decision"),
    ("action", pa.string(), "the action sent to the environment"),
    ("valid", pa.bool_(), "whether the response had the required form"),
    ("outcome", pa.string(), "what the environment answered to the action"),
    ("reward", pa.float64(), "the environment's reward for this step"),
    ("finish_reason", pa.string(), "`stop` or `length`"),
    ("prompt_cut", pa.string(), "what the prompt left out for its length: `none`, `history` or `observation`"),
    ("invalid_action", pa.bool_(), "whether the environment did not understand the action, where it says so"),
)
_TURN_INDEX = ("turn_index", pa.int32(), "index of the turn in its trajectory; null where no turn was taken")


def _schema() -> pa.Schema:
    columns = (*_TRAJECTORY_COLUMNS, _TURN_INDEX, *_TURN_COLUMNS)
    fields = [pa.field(name, kind, metadata={"description": text}) for name, kind, text in columns]
    return pa.schema(fields, metadata={_VERSION_KEY: str(SCHEMA_VERSION).encode()})


SCHEMA = _schema()
"""Columns of a file, each with its description; ``iteration`` comes from the folder's name."""

_PARTITION = pds.partitioning(pa.schema([("iteration", pa.int32())]), flavor="hive")


def write_groups(
    folder: str | os.PathLike[str], iteration: int, groups: Sequence[TrajectoryGroup], writer_id: str
) -> Path:
    """Write the groups of one iteration as one new file, and return its path.

    Args:
        folder: root of the recording; made where missing.
        iteration: training iteration in which the groups were sampled.
        groups: what was sampled; a rollout that failed before its first turn keeps one row without a turn.
        writer_id: who writes, such as ``"runner003"``; a part of the file's name.

    Raises:
        UserInputError: ``writer_id`` could not be part of a file name, or ``iteration`` is negative.
    """
    if not writer_id or not writer_id.replace("-", "").replace("_", "").isalnum():
        raise UserInputError(f"writer_id must be letters, digits, '-' and '_'; got {writer_id!r}.")
    if iteration < 0:
        raise UserInputError(f"iteration must not be negative; got {iteration}.")
    # A runner that was restarted counts from zero again, so its own name would not be unique.
    stem = f"{writer_id}-{uuid.uuid4().hex[:12]}"
    target = Path(folder) / f"iteration={iteration:05d}" / f"{stem}.parquet"
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{stem}.unfinished")
    table = pa.Table.from_pylist(list(_rows(stem, groups)), schema=SCHEMA)
    try:
        pq.write_table(table, unfinished, compression="zstd")
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
    return target


def _rows(stem: str, groups: Sequence[TrajectoryGroup]) -> Iterator[dict[str, Any]]:
    for group_index, group in enumerate(groups):
        for rollout_index, trajectory in enumerate(group.trajectories):
            common = {"group_id": f"{stem}-{group_index:05d}", "rollout_index": rollout_index}
            common |= {name: getattr(trajectory, name) for name, _, _ in _TRAJECTORY_COLUMNS if name not in common}
            if not trajectory.turns:
                yield common
            for turn_index, turn in enumerate(trajectory.turns):
                yield common | {"turn_index": turn_index} | {name: getattr(turn, name) for name, _, _ in _TURN_COLUMNS}


def read_turns(folder: str | os.PathLike[str], iteration: int | None = None) -> pa.Table:
    """Every recorded turn (of one iteration, or of all), as a table with the columns of ``SCHEMA`` and ``iteration``.

    Rows come in the order iteration, group, rollout, turn.

    Raises:
        UserInputError: nothing was recorded there, or by another version of the schema.
    """
    table = _read(folder, iteration)
    return table.filter(pc.is_valid(table["turn_index"]))


def read_trajectories(folder: str | os.PathLike[str], iteration: int | None = None) -> list[Trajectory]:
    """Every recorded trajectory (of one iteration, or of all), the ones that failed before their first turn included.

    Raises:
        UserInputError: nothing was recorded there, or by another version of the schema.
    """
    trajectories: dict[tuple[str, int], Trajectory] = {}
    for row in _read(folder, iteration).to_pylist():
        key = row["group_id"], row["rollout_index"]
        if key not in trajectories:
            values = {name: row[name] for name, _, _ in _TRAJECTORY_COLUMNS[2:]}
            trajectories[key] = Trajectory(**values | {"solution": tuple(row["solution"])})
        if row["turn_index"] is not None:
            trajectories[key].turns.append(_turn(row))
    return list(trajectories.values())


def _turn(row: dict[str, Any]) -> Turn:
    values = {name: row[name] for name, _, _ in _TURN_COLUMNS}
    for name, kind in (("prompt_ids", np.int32), ("response_ids", np.int32), ("logprobs", np.float32)):
        values[name] = np.array(values[name], kind)
    return Turn(**values)


def _read(folder: str | os.PathLike[str], iteration: int | None) -> pa.Table:
    pattern = "iteration=*" if iteration is None else f"iteration={iteration:05d}"
    files = sorted(Path(folder).glob(f"{pattern}/*.parquet"))
    if not files:
        raise UserInputError(
            f"No trajectories in {Path(folder) / pattern}; expected Parquet files. "
            "Record some by training with a trajectories folder, or name the folder that holds 'iteration=...' folders."
        )
    for file in files:
        found = (pq.read_schema(file).metadata or {}).get(_VERSION_KEY, b"none").decode()
        if found != str(SCHEMA_VERSION):
            raise UserInputError(
                f"{file} has schema version {found}; expected {SCHEMA_VERSION}. Read it with the release that wrote it."
            )
    dataset = pds.dataset(
        [str(file) for file in files],
        schema=SCHEMA.append(pa.field("iteration", pa.int32())),
        partitioning=_PARTITION,
        format="parquet",
        partition_base_dir=str(folder),
    )
    keys = ("iteration", "group_id", "rollout_index", "turn_index")
    return dataset.to_table().sort_by([(key, "ascending") for key in keys])


def schema_table() -> str:
    """The columns as a Markdown table, for the documentation."""
    lines = ["| column | type | meaning |", "| --- | --- | --- |"]
    lines.append("| `iteration` | int32 | training iteration, from the folder's name |")
    for field in SCHEMA:
        kind = str(field.type).replace("element: ", "").replace("item: ", "")
        lines.append(f"| `{field.name}` | {kind} | {field.metadata[b'description'].decode()} |")
    return "\n".join(lines)
