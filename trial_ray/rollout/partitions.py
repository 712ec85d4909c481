"""Parquet files in ``iteration=00012/`` folders, which pyarrow, pandas, DuckDB and Spark read as a partition column.

Several processes can write at the same time: every file has a unique name and appears complete or not at all. Its schema
version is in its metadata, and its name ends in the checksum of its bytes.
"""

from __future__ import annotations

import os
import re
import uuid
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trial_ray.errors import UserInputError, first_line
from trial_ray.files import partial_of

VERSION_KEY = b"trial_ray.schema_version"
"""Key of the schema version in a file's metadata."""

IDS, FLOATS = pa.list_(pa.int32()), pa.list_(pa.float32())

_UNREADABLE = (pa.ArrowException, OSError, ValueError, KeyError, MemoryError)
"""Errors that pyarrow raises for damaged files."""
_CHECKSUM = re.compile(r"-crc([0-9a-f]{8})\.parquet$")


def new_schema(columns: Iterable[tuple[str, pa.DataType, str]], version: int) -> pa.Schema:
    """Create a schema; ``iteration`` comes from the folder's name.

    Args:
        columns: name, type and description of each column.
        version: version of the schema.
    """
    fields = [pa.field(name, kind, metadata={"description": text}) for name, kind, text in columns]
    return pa.schema(fields, metadata={VERSION_KEY: str(version).encode()})


def partition(folder: str | os.PathLike[str], iteration: int) -> Path:
    """Return the folder of one iteration's files in ``folder``.

    Raises:
        UserInputError: ``iteration`` is negative.
    """
    if iteration < 0:
        raise UserInputError(f"iteration must not be negative; got {iteration}.")
    return Path(folder).expanduser() / f"iteration={iteration:05d}"


def partitions(folder: str | os.PathLike[str]) -> dict[int, Path]:
    """Return the iteration folders in ``folder`` by iteration, in ascending order; folders with other names are ignored."""
    matches = (
        (re.fullmatch(r"iteration=([0-9]{1,9})", path.name), path)
        for path in Path(folder).expanduser().glob("iteration=*")
    )
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def write_rows(
    folder: str | os.PathLike[str], iteration: int, rows: Sequence[dict[str, Any]], schema: pa.Schema, writer_id: str
) -> Path:
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
    # A restarted process counts its files from zero again, so the writer's id alone would not be unique.
    stem = f"{writer_id}-{uuid.uuid4().hex[:12]}-crc{zlib.crc32(content):08x}"
    target = partition(folder, iteration) / f"{stem}.parquet"
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = partial_of(target)
    try:
        unfinished.write_bytes(content)
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
    return target


def _repeating(schema: pa.Schema) -> list[str]:
    """Return columns with repeating values, by their paths in a file; a dictionary of other columns would make files larger."""
    kinds = {field.name: field.type.value_type if pa.types.is_list(field.type) else field.type for field in schema}
    return [
        f"{name}.list.element" if pa.types.is_list(schema.field(name).type) else name
        for name, kind in kinds.items()
        if not pa.types.is_floating(kind)
    ]


def read_rows(
    folder: str | os.PathLike[str],
    iteration: int | None,
    schema: pa.Schema,
    content: str,
    advice: str,
) -> pa.Table:
    """Read rows of one iteration, or of all, with the columns of ``schema`` and ``iteration``.

    Rows are in the order of iterations and of file names, and within a file as written.

    Args:
        folder: root of the recording.
        iteration: training iteration; ``None``: all.
        schema: schema that the files must have.
        content: name of the recorded data, for the error if nothing was recorded.
        advice: remedy in that error.

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
    return pa.concat_tables([_read(file, number, schema) for number, file in files])


def _read(file: Path, iteration: int, schema: pa.Schema) -> pa.Table:
    """Return the rows of a file."""
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
