"""Parquet files in ``iteration=00012/`` folders, which pyarrow, pandas, DuckDB and Spark read as a partition column.

Many processes write side by side: every file has a name of its own and appears whole or not at all. The version of its schema
is in its metadata. Its name ends in the checksum of its bytes, since Parquet's own cover neither headers of pages nor the footer.
"""

from __future__ import annotations

import os
import re
import uuid
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as pds
import pyarrow.parquet as pq

from trial_ray.errors import UserInputError, first_line

VERSION_KEY = b"trial_ray.schema_version"
"""Key of the schema's version in a file's metadata."""
ROWS_KEY = b"trial_ray.rows"
"""Key of the number of rows, which no checksum of Parquet's covers."""

SINCE = "since"
"""Key of the version that a column came with in the column's metadata; 0 for those that every file has."""

IDS, FLOATS = pa.list_(pa.int32()), pa.list_(pa.float32())

_UNREADABLE = (pa.ArrowException, OSError, ValueError, KeyError, MemoryError)
"""Errors that pyarrow raises for damaged files."""
_CHECKED = pds.ParquetFileFormat(
    default_fragment_scan_options=pds.ParquetFragmentScanOptions(page_checksum_verification=True)
)
_CHECKSUM = re.compile(r"-crc([0-9a-f]{8})\.parquet$")
_PARTITION = pds.partitioning(pa.schema([("iteration", pa.int32())]), flavor="hive")


def new_schema(
    columns: Iterable[tuple[str, pa.DataType, str]], version: int, added: Mapping[str, int] | None = None
) -> pa.Schema:
    """A schema; ``iteration`` comes from the folder's name.

    Args:
        columns: name, type and description of each.
        version: of the schema.
        added: columns that files of earlier versions lack, and the version that each came with; they are read as null there.
            Files of the versions before the first of these are not read.
    """
    since = added or {}
    fields = [
        pa.field(name, kind, metadata={"description": text, SINCE: str(since.get(name, 0))})
        for name, kind, text in columns
    ]
    return pa.schema(fields, metadata={VERSION_KEY: str(version).encode()})


def partition(folder: str | os.PathLike[str], iteration: int) -> Path:
    """The folder of one iteration's files below ``folder``.

    Raises:
        UserInputError: ``iteration`` is negative.
    """
    if iteration < 0:
        raise UserInputError(f"iteration must not be negative; got {iteration}.")
    return Path(folder).expanduser() / f"iteration={iteration:05d}"


def partitions(folder: str | os.PathLike[str]) -> dict[int, Path]:
    """The iterations that ``folder`` holds folders of, in ascending order; folders of other names are passed over."""
    names = (
        (re.fullmatch(r"iteration=([0-9]{1,9})", path.name), path)
        for path in Path(folder).expanduser().glob("iteration=*")
    )
    return dict(sorted((int(name[1]), path) for name, path in names if name))


def write_rows(
    folder: str | os.PathLike[str], iteration: int, rows: Sequence[dict[str, Any]], schema: pa.Schema, writer_id: str
) -> Path:
    """Write rows of one iteration as one new file, and return its path.

    Args:
        folder: root of the recording; made where missing.
        iteration: of training.
        rows: values by column; one that is missing is null.
        schema: of :func:`new_schema`.
        writer_id: who writes, such as ``"runner003"``; a part of the file's name.

    Raises:
        UserInputError: ``writer_id`` could not be part of a file name, or ``iteration`` is negative.
    """
    if not writer_id or not writer_id.replace("-", "").replace("_", "").isalnum():
        raise UserInputError(f"writer_id must be letters, digits, '-' and '_'; got {writer_id!r}.")
    marked = schema.with_metadata({**(schema.metadata or {}), ROWS_KEY: str(len(rows)).encode()})
    table, sink = pa.Table.from_pylist(list(rows), schema=marked), pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", use_dictionary=_repeating(schema), write_page_checksum=True)
    content = sink.getvalue()
    # A process that was restarted counts from zero again, so its own name would not be unique.
    stem = f"{writer_id}-{uuid.uuid4().hex[:12]}-crc{zlib.crc32(content):08x}"
    target = partition(folder, iteration) / f"{stem}.parquet"
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{stem}.unfinished")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
    return target


def _repeating(schema: pa.Schema) -> list[str]:
    """Columns whose values repeat, by their paths in a file; a dictionary of log-probabilities would make files larger."""
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
    what: str,
    advice: str,
) -> pa.Table:
    """Rows of one iteration, or of all, with the columns of ``schema`` and ``iteration``.

    They come in the order of iterations and of file names, and as they were written.

    Args:
        folder: root of the recording.
        iteration: of training; ``None``: all.
        schema: that the files must have.
        what: was recorded, for the error where nothing was.
        advice: what to do then.

    Raises:
        UserInputError: nothing was recorded there, or a file is cut, damaged, of another version of the schema, or lacks columns.
    """
    folder = Path(folder).expanduser()
    pattern = "iteration=*" if iteration is None else partition(folder, iteration).name
    folders = partitions(folder)
    chosen = list(folders.values()) if iteration is None else [folders[iteration]] if iteration in folders else []
    files = [file for each in chosen for file in sorted(each.glob("*.parquet"))]
    if not files:
        raise UserInputError(f"No {what} in {folder / pattern}; expected Parquet files. {advice}")
    for file in files:
        _require_schema(file, schema)
        _require_whole(file)
    dataset = pds.dataset(
        [str(file) for file in files],
        schema=schema.append(pa.field("iteration", pa.int32())),
        partitioning=_PARTITION,
        format=_CHECKED,
        partition_base_dir=str(folder),
    )
    try:
        return dataset.to_table()
    except _UNREADABLE as error:
        raise UserInputError(
            f"A file below {folder / pattern} is damaged ({first_line(error)}). Copy the folder again from where it was "
            "written."
        ) from error


def _require_whole(file: Path) -> None:
    checksum = _CHECKSUM.search(file.name)  # files of earlier releases have none
    if checksum and zlib.crc32(file.read_bytes()) != int(checksum[1], 16):
        raise UserInputError(f"{file} is damaged: its bytes are not those that were written. Copy it again.")


def _require_schema(file: Path, schema: pa.Schema) -> None:
    try:
        with pq.ParquetFile(file) as opened:
            found, rows = opened.schema_arrow, opened.metadata.num_rows
    except _UNREADABLE as error:
        raise UserInputError(
            f"{file} is no complete Parquet file ({first_line(error)}). Copy it again from where it was written, or remove it."
        ) from error
    version, expected = (
        (each.metadata or {}).get(VERSION_KEY, b"none").decode(errors="replace") for each in (found, schema)
    )
    since = {field.name: int(field.metadata[SINCE.encode()]) for field in schema}
    oldest = min((came - 1 for came in since.values() if came), default=int(expected))
    if version not in map(str, range(oldest, int(expected) + 1)):
        raise UserInputError(
            f"{file} has schema version {version}; expected {expected}. Read it with the release that wrote it."
        )
    if missing := [name for name, came in since.items() if came <= int(version) and name not in found.names]:
        raise UserInputError(
            f"{file} lacks columns of schema version {version}: {', '.join(missing)}. It was changed after it was written; "
            "copy it again from where it was written."
        )
    written = (found.metadata or {}).get(ROWS_KEY, str(rows).encode())  # files of earlier releases do not say it
    if written != str(rows).encode():
        raise UserInputError(f"{file} is damaged: it has {rows} rows, others were written. Copy it again.")


def columns_table(schema: pa.Schema) -> str:
    """The columns as a Markdown table, for the documentation."""
    lines = ["| column | type | meaning |", "| --- | --- | --- |"]
    lines.append("| `iteration` | int32 | training iteration, from the folder's name |")
    for field in schema:
        kind = str(field.type).replace("element: ", "").replace("item: ", "")
        lines.append(f"| `{field.name}` | {kind} | {field.metadata[b'description'].decode()} |")
    return "\n".join(lines)
