"""Records (byte strings) on disk: a file of bytes and a file of offsets, both memory-mapped for reading."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from trial_envs.errors import CorruptCatalogueError

REBUILD = "Delete the index folder and prepare or import the data again."
"""Advice in error messages about a damaged index."""

Scalar = TypeVar("Scalar", bound=np.generic)


def load_array(folder: Path, name: str, scalar: type[Scalar]) -> NDArray[Scalar]:
    """Map the array in ``<name>.npy`` into memory, read-only.

    Raises:
        CorruptCatalogueError: the file is missing or does not contain an array of the type ``scalar``.
    """
    path = folder / f"{name}.npy"
    try:
        # Convert the memmap object to a plain array, because slicing a memmap object takes several times as long.
        array: NDArray[Scalar] = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except (OSError, ValueError, EOFError) as error:
        raise CorruptCatalogueError(f"{path} is not a readable array: {error}. {REBUILD}") from error
    if not np.issubdtype(array.dtype, scalar):
        raise CorruptCatalogueError(f"{path} has the type {array.dtype}, expected {scalar.__name__}. {REBUILD}")
    return array


def save_array(folder: Path, name: str, values: ArrayLike, dtype: DTypeLike) -> None:
    """Write ``values`` to the file ``<name>.npy``."""
    np.save(folder / f"{name}.npy", np.asarray(values, dtype=dtype), allow_pickle=False)


class RecordWriter:
    """Writes records one after the other; :meth:`close` writes their offsets."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._stream = (folder / f"{name}.bin").open("wb")
        self._offsets = [0]

    def append(self, record: bytes) -> None:
        """Add one record."""
        self._stream.write(record)
        self._offsets.append(self._offsets[-1] + len(record))

    def close(self) -> None:
        """Close the file of records and write the file of offsets."""
        self._stream.close()
        save_array(self._folder, f"{self._name}.offsets", self._offsets, "int64")


def write_records(folder: Path, name: str, records: Iterable[bytes]) -> None:
    """Write ``records`` to the files ``<name>.bin`` and ``<name>.offsets.npy``."""
    writer = RecordWriter(folder, name)
    for record in records:
        writer.append(record)
    writer.close()


class RecordFile:
    """Random access to the records that a :class:`RecordWriter` wrote.

    Raises:
        CorruptCatalogueError: a file is missing, or the last offset is not the size of the file of bytes.
    """

    def __init__(self, folder: Path, name: str) -> None:
        path = folder / f"{name}.bin"
        self._offsets = load_array(folder, f"{name}.offsets", np.int64)
        try:
            size = os.stat(path).st_size
        except OSError as error:
            raise CorruptCatalogueError(f"{path} cannot be read: {error}. {REBUILD}") from error
        if self._offsets.ndim != 1 or not len(self._offsets) or int(self._offsets[-1]) != size:
            raise CorruptCatalogueError(f"{path} has {size} bytes, which differs from its last offset. {REBUILD}")
        self._bytes = np.asarray(np.memmap(path, dtype=np.uint8, mode="r")) if size else np.zeros(0, dtype=np.uint8)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, number: int) -> bytes:
        start, end = self._offsets[number : number + 2].tolist()
        return self._bytes[start:end].tobytes()
