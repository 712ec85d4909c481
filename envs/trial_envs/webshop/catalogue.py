"""An indexed shop on disk, memory-mapped and read-only: products, goals and the search index.

All environments of a process with the same shop share one catalogue, also across threads.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TypedDict, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from trial_envs.core.cache import cache_folder
from trial_envs.core.forks import fork_safe_lock
from trial_envs.errors import CorruptCatalogueError
from trial_envs.webshop.goal import Goal
from trial_envs.webshop.pages import Listing
from trial_envs.webshop.product import Product
from trial_envs.webshop.records import REBUILD, RecordFile, load_array
from trial_envs.webshop.search import SearchIndex

FORMAT = 1
"""Version of the layout of an index folder."""
MANIFEST = "manifest.json"
CHECKED_AT_OPEN = 32 << 20
"""Indices up to this many bytes are compared with their digests whenever they are opened."""

_FILE_NAME = re.compile(r"\w[\w.-]{0,99}", re.ASCII)


class FileEntry(TypedDict):
    """A file of an index folder: its size and its SHA-256."""

    bytes: int
    sha256: str


Groups = dict[str, list[str]]
"""Kind of group -> names of the groups in the order of their codes; a shop has ``categories`` and ``collections``."""
Opened = TypeVar("Opened")


class Manifest(TypedDict):
    """The content of :data:`MANIFEST`."""

    format: int
    source: dict[str, object]
    documents: int
    groups: Groups
    files: dict[str, FileEntry]


class Catalogue:
    """The products, goals and search of a shop.

    Raises:
        CorruptCatalogueError: a file is missing or differs from the manifest.
    """

    def __init__(self, folder: Path) -> None:
        manifest = checked_manifest(folder)
        self.folder = folder
        self._products = RecordFile(folder, "products")
        self._listings = RecordFile(folder, "listings")
        self._goals = RecordFile(folder, "goals")
        self._prices = load_array(folder, "prices", np.float64)
        self._asins = load_array(folder, "asins", np.bytes_)
        self._by_asin = load_array(folder, "by_asin", np.int32)
        self._categories = load_array(folder, "categories", np.int32)
        self._collections = load_array(folder, "collections", np.int32)
        self._groups = manifest["groups"]
        self._index = SearchIndex(folder, manifest["documents"])

    @property
    def num_products(self) -> int:
        """Number of products; their positions count from 0 in the order of the data."""
        return len(self._products)

    @property
    def num_goals(self) -> int:
        """Number of goals."""
        return len(self._goals)

    def goal(self, number: int) -> Goal:
        """Return the goal with this number."""
        return Goal.unpack(self._goals[number])

    def product(self, position: int) -> Product:
        """Return the product at a position."""
        return Product.unpack(self._products[position])

    def price(self, position: int) -> float:
        """Return the price of a product."""
        return float(self._prices[position])

    def listing(self, position: int) -> Listing:
        """Return a product as shown on a results page."""
        try:
            return Listing(position, *json.loads(self._listings[position]))
        except (ValueError, TypeError) as error:
            raise CorruptCatalogueError(f"{self.folder}: listing {position} is damaged. {REBUILD}") from error

    def position(self, asin: str) -> int:
        """Return the position of a product.

        Raises:
            KeyError: the shop has no such product.
        """
        rank = int(np.searchsorted(self._asins, asin.encode()))
        if rank == len(self._asins) or self._asins[rank] != asin.encode():
            raise KeyError(asin)
        return int(self._by_asin[rank])

    def search(self, query: str) -> NDArray[np.int64]:
        """Return the positions of the best products for a query, best first, at most 50."""
        return self._index.search(query)

    def in_category(self, name: str) -> NDArray[np.int64]:
        """Return the positions of all products of a category, in the order of the data."""
        return self._in_group("categories", self._categories, name)

    def in_collection(self, name: str) -> NDArray[np.int64]:
        """Return the positions of all products with the ``query`` ``name``, in the order of the data."""
        return self._in_group("collections", self._collections, name)

    def _in_group(self, kind: str, codes: NDArray[np.int32], name: str) -> NDArray[np.int64]:
        names = self._groups[kind]
        return np.flatnonzero(codes == names.index(name)) if name in names else np.zeros(0, dtype=np.int64)


def checked_manifest(folder: Path) -> Manifest:
    """Read the manifest of an index folder and compare the folder's files with it.

    Raises:
        CorruptCatalogueError: a file is missing or differs from the manifest.
    """
    manifest = read_manifest(folder)
    check_files(folder, manifest, digests=sum(f["bytes"] for f in manifest["files"].values()) <= CHECKED_AT_OPEN)
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of an index folder.

    Raises:
        CorruptCatalogueError: the manifest is missing, damaged, or of another format version.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version, _ = manifest["format"], (manifest["files"], manifest["documents"], manifest["groups"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptCatalogueError(f"{path} is not the manifest of an index: {error}. {REBUILD}") from error
    if version != FORMAT:
        raise CorruptCatalogueError(f"{path} has the format version {version}, expected {FORMAT}. {REBUILD}")
    return cast(Manifest, manifest)


def check_files(folder: Path, manifest: Manifest, digests: bool) -> None:
    """Compare the sizes of all files with the manifest, with ``digests`` also their digests.

    Raises:
        CorruptCatalogueError: a file differs.
    """
    for name, expected in manifest["files"].items():
        if not _FILE_NAME.fullmatch(name):
            raise CorruptCatalogueError(
                f"{folder / MANIFEST} lists {name!r:.100}, which is not a file inside it. {REBUILD}"
            )
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size != expected["bytes"]:
            actual = "missing" if size is None else f"{size} bytes"
            raise CorruptCatalogueError(f"{path}: {actual}, expected {expected['bytes']}. {REBUILD}")
        if digests and file_digest(path) != expected["sha256"]:
            raise CorruptCatalogueError(f"{path} does not have the digest in {MANIFEST}. {REBUILD}")


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


_Key = tuple[Callable[[Path], object], Path, int, int]
_open: weakref.WeakValueDictionary[_Key, object] = weakref.WeakValueDictionary()
_lock = fork_safe_lock()


def open_catalogue(folder: Path) -> Catalogue:
    """Open the catalogue of an index folder; arguments and errors as in :func:`open_index`."""
    return open_index(folder, Catalogue)


def find_index(data: str | os.PathLike[str] | None, variable: str, imported: str) -> Path | None:
    """Return the folder given by argument or environment variable, else the imported index of a name, else ``None``."""
    if chosen := data or os.environ.get(variable):
        return Path(chosen).expanduser()
    folder = cache_folder() / imported
    return folder if (folder / MANIFEST).is_file() else None


def open_index(folder: Path, kind: Callable[[Path], Opened]) -> Opened:
    """Open an index folder; all callers share one object while it is in use.

    Args:
        folder: the index folder.
        kind: class of the object, which is created from the folder.

    Raises:
        CorruptCatalogueError: a file is missing or differs from the manifest.
    """
    folder = folder.resolve()
    try:
        state = (folder / MANIFEST).stat()
    except OSError as error:
        raise CorruptCatalogueError(f"{folder / MANIFEST} cannot be read: {error}. {REBUILD}") from error
    key = (kind, folder, state.st_ino, state.st_mtime_ns)  # The value differs if the index was replaced.
    with _lock:
        opened = cast("Opened | None", _open.get(key))
        if opened is None:
            opened = _open[key] = kind(folder)
        return opened
