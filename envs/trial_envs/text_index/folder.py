"""Index folders: memory-mapped files, and a manifest with their sizes and digests.

A folder is first written under a temporary name and then renamed, so no process reads a partial index. A process opens a folder
once, and its threads share the resulting object.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypedDict, TypeVar, cast

from trial_envs.core.cache import cache_folder
from trial_envs.core.forks import fork_safe_lock
from trial_envs.errors import CorruptCatalogueError
from trial_envs.text_index.records import REBUILD

FORMAT = 2
"""Version of the layout of an index folder."""
MANIFEST = "manifest.json"
CHECKED_AT_OPEN = 32 << 20
"""Maximum total size, in bytes, of the files whose digests are checked whenever an index is opened; for larger indices, only
the sizes of the files are checked."""

_FILE_NAME = re.compile(r"\w[\w.-]{0,99}", re.ASCII)


class FileEntry(TypedDict):
    """A file of an index folder: its size and its SHA-256."""

    bytes: int
    sha256: str


Groups = dict[str, list[str]]
"""Lists of names by kind, such as ``splits`` or ``categories``; an index's files refer to a name by its position in its list."""
Opened = TypeVar("Opened")


class Manifest(TypedDict):
    """The content of the manifest file of an index folder."""

    format: int
    source: dict[str, object]
    documents: int
    groups: Groups
    files: dict[str, FileEntry]


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
    """Compare the sizes of all files, and if ``digests`` is true also their SHA-256, with the manifest.

    Raises:
        CorruptCatalogueError: a file differs from the manifest.
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


def find_index(data: str | os.PathLike[str] | None, variable: str, imported: str) -> Path | None:
    """Return the folder ``data``, else the folder in the environment variable, else the cached index, else ``None``.

    Args:
        data: a folder, or ``None``.
        variable: name of the environment variable.
        imported: name of the index folder in the cache.
    """
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
    # The manifest's inode or modification time differs if the index was replaced.
    key = (kind, folder, state.st_ino, state.st_mtime_ns)
    with _lock:
        opened = cast("Opened | None", _open.get(key))
        if opened is None:
            opened = _open[key] = kind(folder)
        return opened


def content_key(origin: Mapping[str, object]) -> str:
    """Return a short digest of an index's origin and the format version, for the name of its folder in the cache."""
    text = json.dumps({"format": FORMAT, **origin}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_folder(
    target: Path, write: Callable[[Path], tuple[Groups, int]], source: Mapping[str, object], replace: bool = False
) -> Path:
    """Write an index folder with its manifest.

    Args:
        target: the index folder to create.
        write: function that writes the files into a folder; it returns the fields ``groups`` and ``documents`` (the number of
            documents with at least one term) of the manifest.
        source: origin of the data, which is written to the manifest.
        replace: whether an existing folder is replaced; otherwise it is kept, because another process may have written it from
            the same data.

    Returns:
        The folder.

    Raises:
        FileExistsError: ``replace`` is true, and the existing ``target`` is not an index.
        CorruptCatalogueError: ``replace`` is false, and the existing ``target`` is not an index; it may have been deleted in part.
    """
    if replace and _is_foreign(target):
        raise FileExistsError(f"{target} exists and is not an index; choose another folder.")
    target.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f"{target.name}-", suffix=".part", dir=target.parent))
    try:
        groups, documents = write(building)
        manifest: Manifest = {
            "format": FORMAT,
            "source": dict(source),
            "documents": documents,
            "groups": groups,
            "files": {
                path.name: {"bytes": path.stat().st_size, "sha256": file_digest(path)}
                for path in sorted(building.iterdir())
            },
        }
        (building / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        building.chmod(0o755)
        _rename(building, target, replace)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    return target


def _rename(building: Path, target: Path, replace: bool) -> None:
    """Rename the temporary folder ``building`` to ``target``, which other processes may create or remove at the same time.

    An existing index is replaced if ``replace`` is true; otherwise it is kept, and ``building`` is removed.
    """
    while True:
        try:
            os.rename(building, target)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            if _is_foreign(target):
                if replace:
                    raise
                raise CorruptCatalogueError(
                    f"{target} exists and is not an index. Delete it, and prepare or import the data again."
                ) from error
        if not target.exists():
            continue
        if not replace:
            shutil.rmtree(building)
            return
        folder = tempfile.TemporaryDirectory(prefix=f"{target.name}-", suffix=".old", dir=target.parent)
        with folder as old, suppress(FileNotFoundError):
            os.rename(target, Path(old) / "index")


def _is_foreign(target: Path) -> bool:
    """Return whether ``target`` is a file, or a folder with files but without the manifest of an index."""
    try:
        names = os.listdir(target)
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        return True
    return bool(names) and MANIFEST not in names
