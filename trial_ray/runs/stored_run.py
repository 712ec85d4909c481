"""Runs in remote storage such as S3: a run's local folder is copied to the storage after each checkpoint and at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any

from trial_ray.errors import CheckpointError, StorageError, UserInputError, first_line
from trial_ray.files import Record, partial_of, read_json, require_new_folder, set_aside, write_folder
from trial_ray.runs.checkpoints import RUN_FILE
from trial_ray.runs.locks import LOCK_FILE, folder_lock
from trial_ray.runs.storage import (
    COPIES,
    Stamp,
    Storage,
    checkpoint_of,
    download,
    is_mark,
    stamp_of,
    whole_checkpoints,
)


def local_folder(place: Path | str) -> Path:
    """Return the folder of a run on this machine; for a URI, a folder in the cache.

    Args:
        place: path of the run, or its URI as a string.

    Raises:
        UserInputError: the URI cannot be opened.
    """
    return Storage.open(place).cached("runs") if isinstance(place, str) else place.resolve()


@contextmanager
def stored_run(
    place: Path | str, *, resume: bool, command: Sequence[str], print_line: Callable[[str], None]
) -> Iterator[Callable[[], None]]:
    """Copy a run's :func:`local_folder` to the remote storage at its URI, on each call of the yielded function and at the end.

    If a call cannot copy a file, it prints a warning, and the next call copies the missing files.

    Args:
        place: path of the run (then nothing is copied), or its URI as a string.
        resume: whether to continue the stored run, which is copied to this machine unless the local folder is as recent.
        command: the command line, shown in the error of another command that uses the run on this machine.
        print_line: prints a line.

    Raises:
        FolderInUseError: another command on this machine writes into the run.
        CheckpointError: there is no run to continue.
        UserInputError: the storage cannot be used, or is not empty for a new run.
        StorageError: the run has ended, but could not be copied to the storage.
    """
    if not isinstance(place, str):
        yield lambda: None
        return
    storage, folder = Storage.open(place), local_folder(place)
    with folder_lock(folder.with_name(f".{folder.name}.storing"), command):
        run = _StoredRun(storage, folder, print_line)
        with storage.answering():
            run.begin(resume)
        try:
            yield run.after_checkpoint
        except BaseException as error:
            try:
                run.finish()
            except StorageError as failure:
                error.add_note(str(failure))
            raise
        run.finish()


class _StoredRun:
    """Copies the changed files in the local folder of a run to remote storage.

    Args:
        storage: folder of the run in remote storage.
        folder: folder of the run on this machine.
        print_line: prints a line.
    """

    def __init__(self, storage: Storage, folder: Path, print_line: Callable[[str], None]) -> None:
        self._storage, self._folder, self._print = storage, folder, print_line
        self._copied: dict[str, Stamp] = {}
        """Size and modification time of each file at the last complete copy, by path in the folder."""
        self._failed = False

    def begin(self, resume: bool) -> None:
        """Require an empty folder in the storage for a new run; copy a resumed run from it unless the local folder is as recent."""
        stored = self._storage.files()
        if not resume:
            if stored:
                raise UserInputError(
                    f"{self._storage.uri} is not empty, it contains {min(stored)}. Name a new folder, or continue with --resume."
                )
            require_new_folder(self._folder, f", or copy its content with --resume {self._storage.uri}")
            # Create the folder now: this raises an error if the storage cannot be written.
            self._storage.filesystem.create_dir(self._storage.root)
        elif not self._continues(stored):
            if RUN_FILE not in stored:
                raise CheckpointError(f"{self._storage.uri} is not a run folder (it has no {RUN_FILE}).")
            if self._folder.exists():
                aside = set_aside(self._folder, "replaced")
                self._print(f"another machine has continued the run; the copy of this machine is now {aside}")
            whole = whole_checkpoints(stored)
            files = {name: info for name, info in stored.items() if not _is_incomplete(name, whole)}
            write_folder(self._folder, lambda partial: download(self._storage, partial, files))
            self._copied = _files_of(self._folder)

    def _continues(self, stored: Record) -> bool:
        """Return True if the run can continue from the local folder, without copying the stored run to this machine.

        This is the case if the local folder contains a run, and the storage contains no run, or the same run without a newer
        checkpoint.
        """
        if not (self._folder / RUN_FILE).is_file():
            return False
        if RUN_FILE not in stored:
            return True
        other = partial_of(self._folder)
        self._storage.fetch(RUN_FILE, other)
        same = read_json(other).get("started") == read_json(self._folder / RUN_FILE).get("started")
        other.unlink()
        return same and _newest(stored) <= _newest(_files_of(self._folder))

    def after_checkpoint(self) -> None:
        """Copy new and changed files to the remote storage; print a warning if this fails."""
        try:
            self._store()
        except Exception as error:  # An error of the storage must not end the run.
            self._failed = True
            self._print(
                f"warning: {self._storage.uri} cannot be written: {first_line(error)}. It lacks {self._missing()}, which are in "
                f"{self._folder}; the next checkpoint tries again"
            )
            return
        if self._failed:
            self._failed = False
            self._print(f"{self._storage.uri} is up to date again")

    def finish(self) -> None:
        """Copy the remaining new and changed files to the remote storage.

        Raises:
            StorageError: copying failed.
        """
        try:
            self._store()
        except Exception as error:
            raise StorageError(
                f"{self._storage.uri} is not up to date: {first_line(error)}. It lacks {self._missing()}. The whole run is in "
                f"{self._folder}; --resume {self._storage.uri} on this machine continues from there, and copies it."
            ) from error
        self._print(f"stored in {self._storage.uri}")

    def _store(self) -> None:
        """Make the run's folder in remote storage contain exactly the current local files.

        Metrics and recordings are copied before checkpoints, a checkpoint's other files before the file that marks it as
        complete (:func:`is_mark`), and ``run.json`` last.
        """
        local = _files_of(self._folder)
        if not local:
            return  # The run failed at its start and removed its folder.
        stored = self._storage.files()
        # Also compare a file's size and modification time with those at its last copy, because the storage's clock may be ahead.
        changed = [
            name
            for name, stamp in local.items()
            if name == RUN_FILE or self._copied.get(name, stamp) != stamp or _differs(stored.get(name), stamp)
        ]
        for mark in filter(is_mark, stored.keys() & changed):
            # A checkpoint without its marking file is ignored until all its files are copied.
            self._storage.remove(mark)
        with ThreadPoolExecutor(COPIES) as pool:
            for _, names in groupby(sorted(changed, key=_rank), _rank):
                list(pool.map(self._put, names))
        gone = stored.keys() - local.keys()
        for name in sorted(gone, key=lambda name: not is_mark(name)):
            self._storage.remove(name)
        for folder in {checkpoint_of(name) for name in gone if name.startswith("checkpoints/")}:
            if not (self._folder / folder).exists():
                self._storage.remove(folder, folder=True)
        self._copied = local

    def _put(self, name: str) -> None:
        try:
            self._storage.put(self._folder / name, name)
        except FileNotFoundError:
            if (self._folder / name).exists():  # A missing file was removed by the run during the copy.
                raise

    def _missing(self) -> str:
        """Return a text with number, size and folders of the files of which the storage does not have the current version."""
        lacking = {name: stamp[0] for name, stamp in _files_of(self._folder).items() if self._copied.get(name) != stamp}
        entries = sorted(
            {checkpoint_of(name) if name.startswith("checkpoints/") else name.partition("/")[0] for name in lacking}
        )
        several = "" if len(lacking) == 1 else "s"
        return f"{len(lacking)} file{several}, {sum(lacking.values()) / 1e6:.1f} MB ({', '.join(entries)})"


def _newest(files: Iterable[str]) -> int:
    """Return the iteration of the newest checkpoint among a run's files; 0 if there is none."""
    return int(max(whole_checkpoints(files), key=int, default="0"))


def _differs(info: Any, stamp: Stamp) -> bool:
    """Return True if the copy of a local file in remote storage is missing, has another size, or is older than the file."""
    return info is None or info.size != stamp[0] or (info.mtime_ns or 0) < stamp[1]


def _rank(name: str) -> int:
    """Return the position of a file in the copying order."""
    return 3 if name == RUN_FILE else 2 if is_mark(name) else 1 if name.startswith("checkpoints/") else 0


def _is_incomplete(name: str, whole: Sequence[str]) -> bool:
    """Return True if a file belongs to a checkpoint that was not copied to the remote storage completely."""
    parts = PurePosixPath(name).parts
    return parts[0] == "checkpoints" and parts[1].isdecimal() and parts[1] not in whole


def _files_of(folder: Path) -> dict[str, Stamp]:
    """Return size and time of a run's files by relative path, without unfinished files and the lock file."""
    files = {}
    for path in folder.rglob("*"):
        parts = path.relative_to(folder).parts
        unfinished = any(part.endswith((".partial", ".unfinished")) for part in parts)
        if not unfinished and path.name != LOCK_FILE:
            with suppress(FileNotFoundError):  # The run may remove a file at any time.
                if path.is_file():
                    files["/".join(parts)] = stamp_of(path)
    return files
