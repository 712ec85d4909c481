"""Writes and reads trajectories as Parquet files: one row per turn, with unchanged token ids, log-probabilities and rewards.

``docs/runs.md`` describes every column.
"""

from __future__ import annotations

import json
import os
import re
import uuid
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from trial_envs.program import ChatCall
from trial_ray.errors import UserInputError, first_line
from trial_ray.files import Json, escaped, replacing, unescaped
from trial_ray.trajectory import Trajectory, TrajectoryGroup, Turn

Folder = str | os.PathLike[str]
"""Path of a folder of recorded data, which has a subfolder for each iteration."""
VERSION_KEY = b"trial_ray.schema_version"
"""Key of the schema version in a file's metadata."""

IDS, FLOATS, TEXTS = map(pa.list_, (pa.int32(), pa.float32(), pa.string()))

_UNREADABLE = (pa.ArrowException, OSError, ValueError, KeyError, MemoryError)
"""Errors that pyarrow raises for damaged files."""
_CHECKSUM = re.compile(r"-crc([0-9a-f]{8})\.parquet$")


def new_schema(columns: Iterable[tuple[str, pa.DataType | str, str]], version: int) -> pa.Schema:
    """Create a schema without the column ``iteration``, which is read from the folder's name.

    Args:
        columns: name, type (or its name in pyarrow) and description of each column.
        version: version of the schema.
    """
    fields = [pa.field(name, kind, metadata={"description": text}) for name, kind, text in columns]
    return pa.schema(fields, metadata={VERSION_KEY: str(version).encode()})


def partition(folder: Folder, iteration: int) -> Path:
    """Return the folder of one iteration's files in ``folder``.

    Raises:
        UserInputError: ``iteration`` is negative.
    """
    if iteration < 0:
        raise UserInputError(f"iteration must not be negative; got {iteration}.")
    return Path(folder).expanduser() / f"iteration={iteration:05d}"


def partitions(folder: Folder) -> dict[int, Path]:
    """Return the iteration folders in ``folder`` by iteration, in ascending order; folders with other names are ignored."""
    matches = (
        (re.fullmatch(r"iteration=([0-9]{1,9})", path.name), path)
        for path in Path(folder).expanduser().glob("iteration=*")
    )
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def write_rows(folder: Folder, iteration: int, rows: Sequence[Json], schema: pa.Schema, writer_id: str) -> Path:
    """Write rows of one iteration to one new file, and return its path.

    Args:
        folder: root of the recording; created if missing.
        iteration: training iteration.
        rows: values by column; missing columns are null.
        schema: schema created by :func:`new_schema`.
        writer_id: name of the writer, such as ``"runner003"``; a part of the file's name.

    Raises:
        UserInputError: ``writer_id`` cannot be part of a file name, or ``iteration`` is negative.
    """
    if not writer_id or not writer_id.replace("-", "").replace("_", "").isalnum():
        raise UserInputError(f"writer_id must be letters, digits, '-' and '_'; got {writer_id!r}.")
    table, sink = pa.Table.from_pylist(list(rows), schema=schema), pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", use_dictionary=_repeating(schema))
    content = sink.getvalue()
    # Add random digits: the writer's id may contain a file counter, which starts from zero again if the process restarts.
    stem = f"{writer_id}-{uuid.uuid4().hex[:12]}-crc{zlib.crc32(content):08x}"
    target = partition(folder, iteration) / f"{stem}.parquet"
    with replacing(target) as partial:
        partial.write_bytes(content)
    return target


def _repeating(schema: pa.Schema) -> list[str]:
    """Return the Parquet paths of the columns to dictionary-encode: all except floats, which would become larger."""
    return [
        f"{field.name}.list.element" if pa.types.is_list(field.type) else field.name
        for field in schema
        if not pa.types.is_floating(getattr(field.type, "value_type", field.type))
    ]


def read_rows(folder: Folder, iteration: int | None, schema: pa.Schema, content: str, advice: str) -> pa.Table:
    """Read rows of one iteration, or of all; the table has the columns of ``schema`` and a column ``"iteration"``.

    Rows are in the order of iterations and of file names, and within a file as written.

    Args:
        folder: root of the recording.
        iteration: training iteration, or ``None`` for all.
        schema: schema that the files must have.
        content: name of the recorded data, for the error if nothing was recorded.
        advice: how to fix that error, for its message.

    Raises:
        UserInputError: nothing was recorded, or a file is truncated, damaged, of another version of the schema, or lacks
            columns.
    """
    folder = Path(folder).expanduser()
    files = [
        (number, file)
        for number, subfolder in partitions(folder).items()
        if iteration in (None, number)
        for file in sorted(subfolder.glob("*.parquet"))
    ]
    if not files:
        pattern = "iteration=*" if iteration is None else partition(folder, iteration).name
        raise UserInputError(f"No {content} in {folder / pattern}; expected Parquet files. {advice}")
    return pa.concat_tables([_read_partition(file, number, schema) for number, file in files])


def _read_partition(file: Path, iteration: int, schema: pa.Schema) -> pa.Table:
    """Check a file, and return its rows with the column ``iteration``."""
    data = file.read_bytes()
    checksum = _CHECKSUM.search(file.name)
    if checksum is None or zlib.crc32(data) != int(checksum[1], 16):
        raise UserInputError(
            f"{file} is damaged: the checksum in its name is missing or is not that of its bytes. Copy it again from where it was "
            "written."
        )
    try:
        table = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True).read()
    except _UNREADABLE as error:
        raise UserInputError(
            f"{file} is not a complete Parquet file ({first_line(error)}). Copy it again from where it was written, or remove it."
        ) from error
    version, expected = (
        (own.metadata or {}).get(VERSION_KEY, b"none").decode(errors="replace") for own in (table.schema, schema)
    )
    if version != expected:
        raise UserInputError(
            f"{file} has schema version {version}; expected {expected}. Read it with the release that wrote it."
        )
    if missing := [name for name in schema.names if name not in table.column_names]:
        raise UserInputError(
            f"{file} lacks columns of schema version {version}: {', '.join(missing)}. It was changed after it was written; "
            "copy it again from where it was written."
        )
    try:
        table = table.select(schema.names).cast(schema)
    except _UNREADABLE as error:
        raise UserInputError(
            f"{file} is damaged ({first_line(error)}). Copy it again from where it was written."
        ) from error
    return table.append_column("iteration", pa.array([iteration] * len(table), pa.int32()))


SCHEMA_VERSION = 9
"""Version of :data:`SCHEMA`; increment it whenever a column is added, or the name, type or meaning of a column changes."""

_TRAJECTORY_COLUMNS = (
    ("group_id", "string", "the group of rollouts of one task; unique in the run"),
    ("rollout_index", "int32", "index of the rollout in its group"),
    ("environment", "string", "name of the run's environment that the rollout was played in"),
    ("task_id", "string", "the environment's id of the task"),
    ("family", "string", "the environment's family of the task"),
    ("seed", "int64", "seed with which the rollout was reset"),
    ("success", "bool", "whether the environment was won"),
    ("score", "float64", "the environment's score, 0 to 1"),
    ("ended", "string", "`terminated`, `turn_limit`, `prompt_limit` or `failed`"),
    ("error", "string", "for `failed` and `prompt_limit`: which error; else null"),
    ("failed_by", "string", "for `failed`: `environment` or `engine`; else null"),
    ("function_reward", "float64", "R_i by the run's reward function; null without one"),
    ("solution", TEXTS, "the environment's own solution of the task; empty without one"),
    ("instruction", "string", "the task in words at the start, which prompts show"),
)
_TURN_COLUMNS = (
    ("prompt_ids", IDS, "the ordinary prompt as sent to the engine, `[P]`"),
    ("response_ids", IDS, "the response as sampled, stop token included, `[y]`"),
    ("logprobs", FLOATS, "behaviour log-probability of each response token in nats, `[y]`"),
    ("weight_version", "int64", "version of the weights that sampled the response"),
    ("temperature", "float64", "temperature at which the response was sampled; 0: greedily"),
    ("insert_at", "int32", "index in `prompt_ids` before which teacher context is inserted"),
    ("observation", "string", "the environment's observation before the decision"),
    ("action", "string", "the action sent to the environment; of several, one a line"),
    ("valid", "bool", "whether the response had the required format"),
    ("outcome", "string", "the environment's answer to the action"),
    ("reward", "float64", "the environment's reward for this step"),
    ("finish_reason", "string", "`stop` or `length`"),
    ("prompt_cut", "string", "part that was dropped from the prompt: `none`, `history` or `observation`"),
    ("invalid_action", "bool", "whether the environment reported that it did not understand the action"),
    ("admissible_actions", TEXTS, "the actions that the environment offered; empty if it offered none"),
    ("call", "string", "JSON of the program's call that the turn answers; null in other environments"),
    ("messages", "string", "JSON list of chat messages sent in this turn; empty where there are ids"),
    ("response", "string", "response of a chat API; empty where there are ids"),
    ("actions", TEXTS, "the actions of a response with several tool calls; else empty"),
    ("answers", TEXTS, "the environment's answers to `actions`; those after the end have none"),
)
_TURN_INDEX = ("turn_index", "int32", "index of the turn in its trajectory; null without turns")


SCHEMA = new_schema((*_TRAJECTORY_COLUMNS, _TURN_INDEX, *_TURN_COLUMNS), SCHEMA_VERSION)
"""Columns of a file, with descriptions; the iteration is in the folder's name."""


def write_groups(folder: Folder, iteration: int, groups: Sequence[TrajectoryGroup], writer_id: str) -> Path:
    """Write the groups of one iteration to one new file, and return its path.

    Args:
        folder: root of the recording; created if missing.
        iteration: training iteration of the groups.
        groups: sampled groups; a rollout that failed before its first turn gets one row without a turn.
        writer_id: name of the writer, such as ``"runner003"``; a part of the file's name.

    Raises:
        UserInputError: ``writer_id`` cannot be part of a file name, or ``iteration`` is negative.
    """
    return write_rows(folder, iteration, list(_rows(groups)), SCHEMA, writer_id)


def write_episode(folder: Folder, trajectory: Trajectory) -> None:
    """Write an episode that was not played in training to one new file, under iteration 0."""
    write_groups(folder, 0, [TrajectoryGroup(trajectory.task_id, [trajectory])], "player")


def _rows(groups: Sequence[TrajectoryGroup]) -> Iterator[Json]:
    for group in groups:
        for rollout_index, trajectory in enumerate(group.trajectories):
            row = {"group_id": group.group_id, "rollout_index": rollout_index}
            row |= {name: _stored(getattr(trajectory, name)) for name, _, _ in _TRAJECTORY_COLUMNS[2:]}
            if not trajectory.turns:
                yield row
            for turn_index, turn in enumerate(trajectory.turns):
                values = {name: _stored(getattr(turn, name)) for name, _, _ in _TURN_COLUMNS}
                yield row | {"turn_index": turn_index} | values


def _stored(value: Any) -> Any:
    if isinstance(value, ChatCall):
        return escaped(json.dumps(asdict(value), ensure_ascii=False))
    if isinstance(value, tuple):
        return [escaped(text) for text in value]
    return escaped(value) if isinstance(value, str) else value


def _restored(row: Json, columns: Iterable[tuple[str, pa.DataType | str, str]]) -> dict[str, Any]:
    return {name: _restored_value(row[name], kind) for name, kind, _ in columns}


def _restored_value(value: Any, kind: pa.DataType | str) -> Any:
    if kind is TEXTS:
        return tuple(map(unescaped, value))
    if isinstance(kind, pa.ListType):
        return np.array(value, kind.value_type.to_pandas_dtype())
    return unescaped(value) if isinstance(value, str) else value


def read_turns(folder: Folder, iteration: int | None = None) -> pa.Table:
    """Read every recorded turn (of one iteration, or of all) as a table with the columns of ``SCHEMA`` and ``iteration``.

    Rows are in the order of iterations; the rows of a trajectory are consecutive, turn by turn. In texts, lone
    surrogates are escaped (:func:`trial_ray.files.escaped`).

    Raises:
        UserInputError: nothing was recorded, or a file cannot be read, see :func:`read_rows`.
    """
    table = _read(folder, iteration)
    return table.filter(pc.is_valid(table["turn_index"]))


def read_trajectories(folder: Folder, iteration: int | None = None) -> list[Trajectory]:
    """Read every recorded trajectory (of one iteration, or of all), including those that failed before their first turn.

    Raises:
        UserInputError: as in :func:`read_turns`.
    """
    return [trajectory for group in read_iteration(folder, iteration) for trajectory in group.trajectories]


def read_iteration(folder: Folder, iteration: int | None) -> list[TrajectoryGroup]:
    """Read the recorded groups of one iteration, or of all if it is ``None``; raises the same errors as :func:`read_turns`."""
    return list(_groups(_read(folder, iteration)).values())


def read_groups(folder: Folder, group_ids: Sequence[str], iteration: int) -> list[TrajectoryGroup]:
    """Read the groups of an update, in the order of ``group_ids``.

    Args:
        folder: root of the recording.
        group_ids: ids of the groups.
        iteration: iteration of the update; with ``max_staleness``, groups may be recorded in earlier iterations.

    Raises:
        UserInputError: as in :func:`read_turns`, or groups are missing.
    """
    groups: dict[str, TrajectoryGroup] = {}
    missing = [*group_ids]
    for number in reversed(partitions(folder)):
        if missing and number <= iteration:
            table = _read(folder, number)
            groups |= _groups(table.filter(pc.is_in(table["group_id"], pa.array(missing, pa.string()))))
            missing = [group_id for group_id in group_ids if group_id not in groups]
    if missing:
        raise UserInputError(
            f"{len(missing)} of the {len(group_ids)} groups of iteration {iteration} are not among the trajectories in {folder}: "
            "their files were removed, or left behind when the run was copied. Copy the whole folder."
        )
    return [groups[group_id] for group_id in group_ids]


def _groups(table: pa.Table) -> dict[str, TrajectoryGroup]:
    groups: dict[str, TrajectoryGroup] = {}
    for row in table.to_pylist():
        group_id, index = row["group_id"], row["rollout_index"]
        group = groups.setdefault(group_id, TrajectoryGroup(unescaped(row["task_id"]), [], group_id))
        if index == len(group.trajectories):
            group.trajectories.append(Trajectory(**_restored(row, _TRAJECTORY_COLUMNS[2:])))
        if row["turn_index"] is not None:
            turn = _restored(row, _TURN_COLUMNS)
            turn["call"] = None if turn["call"] is None else ChatCall(**json.loads(turn["call"]))
            group.trajectories[index].turns.append(Turn(**turn))
    return groups


def _read(folder: Folder, iteration: int | None) -> pa.Table:
    advice = "Record some by training with a trajectories folder, or name the folder with 'iteration=...' folders."
    return read_rows(folder, iteration, SCHEMA, "trajectories", advice)
