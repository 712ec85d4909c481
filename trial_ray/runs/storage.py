"""Folders in remote storage, by URI (``s3://``, ``gs://``, ``hdfs://`` or ``file://``), and local copies of runs stored there."""

from __future__ import annotations

import os
import posixpath
import re
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qsl, quote, urlsplit

from trial_ray.errors import TrialRayError, UserInputError, first_line
from trial_ray.files import Json, Record, cache_root, content_key, replacing
from trial_ray.runs.checkpoints import ADAPTER_INSIDE_CHECKPOINT, CHECKPOINT_MARK, MODEL_INSIDE_CHECKPOINT, RUN_FILE
from trial_ray.secrets import is_secret_name

URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_RESERVED = ":/?#[]@!$&'()*+,;=%"
"""Characters of a URI, besides letters, digits and ``_.-~``, that are not percent-encoded."""
_PASSWORD = re.compile(r"://[^?@]*:[^?]*@")
CHUNK = 16 << 20
"""Number of bytes that are copied at a time."""
COPIES = 8
"""Number of files that are copied at the same time."""
Stamp = tuple[int, int]
"""Size of a file in bytes, and its modification time in nanoseconds."""


@dataclass(frozen=True)
class Storage:
    """A folder in remote storage such as S3.

    Attributes:
        uri: URI as the user gave it; :meth:`open` rejects a URI with credentials.
        filesystem: pyarrow's file system.
        root: path of the folder in the file system.
    """

    uri: str
    filesystem: Any
    root: str

    @classmethod
    def open(cls, uri: str) -> Storage:
        """Create the file system of a URI, without checking that the storage responds.

        Raises:
            UserInputError: the URI contains credentials, or pyarrow does not support it.
        """
        from pyarrow import ArrowException
        from pyarrow.fs import FileSystem

        if _PASSWORD.search(uri) or any(is_secret_name(name) for name, _ in parse_qsl(urlsplit(uri).query)):
            raise UserInputError(
                f"The URI ({uri.partition('://')[0]}://...) contains credentials, and commands are recorded. Leave them "
                "out, and give them by the environment (of S3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY)."
            )
        try:
            # With allow_delayed_open, writing a small file to S3 takes one request instead of three.
            option = f"{'&' if '?' in uri else '?'}allow_delayed_open=true" if uri.lower().startswith("s3:") else ""
            filesystem, root = FileSystem.from_uri(quote(uri, safe=_RESERVED) + option)
        except (ArrowException, OSError, ValueError) as error:
            raise UserInputError(
                f"{uri} cannot be opened: {first_line(error)}. Expected a URI such as s3://BUCKET/FOLDER, "
                "s3://BUCKET/FOLDER?endpoint_override=HOST:PORT&scheme=http, gs://BUCKET/FOLDER or file:///FOLDER."
            ) from error
        # The path also determines a folder in the local cache; ".." could place this folder outside of the cache.
        if ".." in PurePosixPath(root).parts:
            raise UserInputError(f"{uri} contains '..'. Name the folder itself.")
        return cls(uri, filesystem, root.rstrip("/"))

    def cached(self, kind: str) -> Path:
        """Return the path of the local cache folder for this folder in remote storage.

        Args:
            kind: ``runs`` for a run that this machine trains, ``copies`` for a copy that is only read.
        """
        parts = urlsplit(self.uri)
        place = content_key({"host": parts.netloc, "options": sorted(parse_qsl(parts.query))})[:8]
        return cache_root().absolute() / "storage" / kind / f"{parts.scheme}-{place}" / self.root.strip("/")

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Convert errors of the remote storage inside the context into errors of this package.

        Raises:
            UserInputError: the storage does not respond, denies access, or does not have the bucket.
        """
        from pyarrow import ArrowException

        try:
            yield
        except TrialRayError:
            raise
        except (ArrowException, OSError) as error:
            raise UserInputError(
                f"{self.uri} cannot be used: {first_line(error)}. Expected a storage that responds and has this bucket. Check the "
                "URI (endpoint_override, scheme, region) and the credentials in the environment (of S3: AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY)."
            ) from error

    def path(self, name: str) -> str:
        """Return the path, in the file system, of the file ``name`` in this folder."""
        return f"{self.root}/{name}"

    def files(self) -> Json:
        """Return the ``pyarrow.fs.FileInfo`` of every file in this folder, by path relative to this folder.

        Raises:
            UserInputError: the storage lists a path that would be outside of this folder.
        """
        from pyarrow.fs import FileSelector

        files = {}
        for info in self.filesystem.get_file_info(FileSelector(self.root, recursive=True, allow_not_found=True)):
            name = info.path.removeprefix(f"{self.root}/")
            parts = PurePosixPath(name).parts
            if ".." in parts or "\0" in name or PurePosixPath(name).is_absolute():
                raise UserInputError(f"{self.uri} lists {name!r}, which is not a file inside it. Remove it there.")
            if info.is_file and parts:
                files[name] = info
        return files

    def fetch(self, name: str, target: Path) -> None:
        """Copy a file from this folder in remote storage to this machine."""
        from pyarrow.fs import LocalFileSystem, copy_files

        copy_files(
            self.path(name), str(target), source_filesystem=self.filesystem, destination_filesystem=LocalFileSystem()
        )

    def put(self, file: Path, name: str) -> None:
        """Copy a file to this folder in remote storage, replacing any existing file."""
        target = self.path(name)
        # Do not use pyarrow's copy_files: it ignores errors when it closes a file on S3, and the file is then missing there.
        try:
            stream = self.filesystem.open_output_stream(target, compression=None)
        except FileNotFoundError:  # The file system requires that the file's folder exists.
            self.filesystem.create_dir(posixpath.dirname(target))
            stream = self.filesystem.open_output_stream(target, compression=None)
        with stream, file.open("rb") as source:
            shutil.copyfileobj(source, stream, CHUNK)

    def remove(self, name: str, *, folder: bool = False) -> None:
        """Remove a file or, with ``folder``, a folder; a missing one is ignored."""
        with suppress(FileNotFoundError):
            (self.filesystem.delete_dir if folder else self.filesystem.delete_file)(self.path(name))

    def run(self) -> tuple[Storage, PurePosixPath]:
        """Return the run that is or contains this folder, and the path of this folder inside the run.

        For the folder of a model outside of runs, return this folder and an empty path.

        Raises:
            UserInputError: this folder is neither in a run nor a model.
        """
        here = PurePosixPath(self.root)
        folders = [folder for folder in (here, *here.parents) if folder.name]
        for folder in folders:
            if self.filesystem.get_file_info(str(folder / RUN_FILE)).is_file:
                return replace(self, root=str(folder)), here.relative_to(folder)
        if self.filesystem.get_file_info(self.path("config.json")).is_file:
            return self, PurePosixPath()
        raise UserInputError(
            f"{self.uri} is not in a run: there is no {RUN_FILE} in it or above. Name the folder of a run, a checkpoint in it, "
            "or a Hugging Face model."
        )


@dataclass(frozen=True)
class StoredCopy:
    """Local copy of a run or a model in remote storage; changes of the copy are never written to the storage.

    Attributes:
        uri: URI of the run, of one of its checkpoints, or of a model.
        checkpoints: number of the run's newest checkpoints to copy, or ``None`` to copy all.
    """

    uri: str
    checkpoints: int | None

    def fetch(self) -> Path:
        """Update the local copy in the cache, and return the local path that corresponds to the URI.

        Raises:
            UserInputError: the storage does not respond, or has no run and no model at the URI.
        """
        place = Storage.open(self.uri)
        with place.answering():
            storage, inside = place.run()
            files, copy = storage.files(), storage.cached("copies")
            whole = whole_checkpoints(files)
            older = 0 if self.checkpoints is None else max(0, len(whole) - self.checkpoints)
            kept = {*whole[older:], *inside.parts[1:2]}
            wanted = {name: info for name, info in files.items() if _is_wanted(name, kept)}
            # Keep models that this machine merged from unchanged LoRA adapters: other commands may use these models.
            adapters = [name for name in wanted if f"/{ADAPTER_INSIDE_CHECKPOINT.as_posix()}/" in name]
            changed = {checkpoint_of(name) for name in adapters if not _is_here(copy / name, wanted[name])}
            merged = {checkpoint_of(name) for name in adapters} - changed
            download(storage, copy, wanted)
        for path in copy.rglob("*"):
            name = path.relative_to(copy).as_posix()
            written_here = "/" not in name or name.startswith("viewer/") or ".partial" in name
            written_here = written_here or (
                f"/{MODEL_INSIDE_CHECKPOINT.as_posix()}/" in name and checkpoint_of(name) in merged
            )
            if path.is_file() and not written_here and name not in files:
                path.unlink(missing_ok=True)
        return copy / inside


def checkpoint_of(name: str) -> str:
    """Return the folder of the checkpoint that contains a file, ``checkpoints/<iteration>``."""
    return "/".join(name.split("/")[:2])


def _is_wanted(name: str, checkpoints: set[str]) -> bool:
    parts = PurePosixPath(name).parts
    return parts[0] != "viewer" and (parts[0] != "checkpoints" or parts[1] in checkpoints)


def is_mark(name: str) -> bool:
    """Return True if a file of a run marks a complete checkpoint; such a file is written last and removed first."""
    parts = PurePosixPath(name).parts
    return len(parts) == 3 and parts[0] == "checkpoints" and parts[2] == CHECKPOINT_MARK


def whole_checkpoints(files: Iterable[str]) -> list[str]:
    """Return the names of the complete checkpoints among a run's files, oldest first."""
    names = (PurePosixPath(name).parts[1] for name in files if is_mark(name))
    return sorted((name for name in names if name.isdecimal()), key=int)


def download(storage: Storage, folder: Path, files: Record) -> None:
    """Copy files from remote storage to ``folder``; each file is copied atomically.

    A file is skipped if ``folder`` already contains it with the same size and modification time.
    """

    def copy(name: str) -> None:
        target, stamp = folder / name, _stamp_of(files[name])
        if _is_here(target, files[name]):
            return
        # A run that is still training may have removed the file.
        with suppress(FileNotFoundError), replacing(target) as partial:
            storage.fetch(name, partial)
            os.utime(partial, ns=(stamp[1], stamp[1]))

    with ThreadPoolExecutor(COPIES) as pool:
        list(pool.map(copy, files))


def _is_here(path: Path, info: Any) -> bool:
    """Return True if a local copy has the size and the modification time of the file in remote storage."""
    return path.is_file() and stamp_of(path) == _stamp_of(info)


def _stamp_of(info: Any) -> Stamp:
    return info.size, info.mtime_ns or 0


def stamp_of(path: Path) -> Stamp:
    """Return the size and the modification time of a file on this machine."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns
