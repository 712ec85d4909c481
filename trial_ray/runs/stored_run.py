"""Keeps a run on a storage: its folder on this machine is copied there after each checkpoint, and in the end."""

from __future__ import annotations

import posixpath
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any

from trial_ray.errors import CheckpointError, StorageError, UserInputError, first_line
from trial_ray.files import read_json, require_new_folder, set_aside, write_folder, write_json
from trial_ray.runs.checkpoints import RUN_FILE
from trial_ray.runs.ownership import LOCK_FILE, folder_lock
from trial_ray.runs.storage import COPIES, WRITER, Stamp, Storage, download, is_mark, stamp_of, whole_checkpoints


def local_folder(place: Path | str) -> Path:
    """Where a run is on this machine.

    Args:
        place: of the run: a path, or a URI as text.

    Raises:
        UserInputError: the URI cannot be opened.
    """
    return Storage.open(place).cached("runs") if isinstance(place, str) else place.resolve()


@contextmanager
def stored_run(
    place: Path | str, *, resume: bool, command: Sequence[str], tell: Callable[[str], None]
) -> Iterator[Callable[[], None]]:
    """While entered, the :func:`local_folder` of a run at a URI is copied there: by a call of what is given, and in the end.

    A call that fails prints a warning, and the next one copies what the storage lacks.

    Args:
        place: of the run: a path, for which nothing is done, or a URI as text.
        resume: whether the run there is to be continued; it is copied here, unless this machine wrote it last.
        command: the command line, which a second command on this machine is refused with.
        tell: prints a line.

    Raises:
        FolderInUseError: another command on this machine writes there.
        CheckpointError: there is no run to continue.
        UserInputError: the storage cannot be used, or holds something where a run is to begin.
        StorageError: the run has ended, and could not be copied there.
    """
    if not isinstance(place, str):
        yield lambda: None
        return
    storage, folder = Storage.open(place), local_folder(place)
    record = folder.with_name(f".{folder.name}.stored")
    with folder_lock(record, command):
        run = _StoredRun(storage, folder, record / "files.json", tell)
        with storage.answering():
            run.begin(resume)
        try:
            yield run.after_checkpoint
        except BaseException as error:
            try:
                run.finish()
            except StorageError as behind:
                error.add_note(str(behind))
            raise
        run.finish()


class _StoredRun:
    """Copies what changed in the folder of a run.

    Args:
        storage: of the run.
        folder: of the run on this machine.
        record: file that keeps what the storage has, and the name under which this machine writes there.
        tell: prints a line.
    """

    def __init__(self, storage: Storage, folder: Path, record: Path, tell: Callable[[str], None]) -> None:
        self._storage, self._folder, self._record, self._tell = storage, folder, record, tell
        self._stored: dict[str, Stamp | None] = {}
        """Files of the storage, with the stamps that they had here; ``None``: of a file that is not here."""
        self._name = uuid.uuid4().hex
        self._failed = False
        self._files, self._bytes, self._seconds = 0, 0, 0.0

    def begin(self, resume: bool) -> None:
        """Copy a run that is to be continued here where that is needed, and note there that this command writes the run now."""
        there = self._storage.files()
        if not resume:
            if there:
                raise UserInputError(
                    f"{self._storage.uri} is not empty, it holds {min(there)}. Name a new folder, or continue with --resume."
                )
            require_new_folder(self._folder, f", or copy what it holds with --resume {self._storage.uri}")
        elif not self._goes_on(there):
            self._copy_here(there)
        self._note()
        note = self._record.with_name("writer")
        note.write_text(self._name, encoding="ascii")
        self._storage.put(note, WRITER)

    def _goes_on(self, there: Mapping[str, Any]) -> bool:
        """Whether what is here is what the storage has, or goes on from it: this machine was the last to write there."""
        if not (self._folder / RUN_FILE).is_file() or not self._record.exists():
            return False
        known = read_json(self._record)
        if there and known["name"] != self._storage.writer():
            return False
        self._stored = {name: tuple(stamp) for name, stamp in known["files"].items() if stamp and name in there}
        return True

    def _copy_here(self, there: Mapping[str, Any]) -> None:
        if RUN_FILE not in there:
            raise CheckpointError(f"{self._storage.uri} is not a run folder (it has no {RUN_FILE}).")
        if self._folder.exists():
            aside = set_aside(self._folder, "replaced")
            self._tell(f"another machine has continued the run; what this one had of it is now {aside}")
        whole = whole_checkpoints(there)
        files = {name: info for name, info in there.items() if not _is_cut(name, whole)}
        write_folder(self._folder, lambda partial: download(self._storage, partial, files))
        self._stored = dict.fromkeys(there) | _files_of(self._folder)

    def after_checkpoint(self) -> None:
        """Copy what the storage lacks; a failure is a warning."""
        if error := self._store():
            self._failed = True
            self._tell(
                f"warning: {self._storage.uri} cannot be written: {first_line(error)}. It lacks {self._missing()}, which are in "
                f"{self._folder}; the next checkpoint tries again"
            )
        elif self._failed:
            self._failed = False
            self._tell(f"{self._storage.uri} is up to date again")

    def finish(self) -> None:
        """Copy what the storage lacks still.

        Raises:
            StorageError: that was not possible.
        """
        if error := self._store():
            raise StorageError(
                f"{self._storage.uri} is not up to date: {first_line(error)}. It lacks {self._missing()}. The whole run is in "
                f"{self._folder}; --resume {self._storage.uri} on this machine goes on from there, and copies it."
            ) from error
        self._tell(
            f"stored in {self._storage.uri}: {self._files} files, {self._bytes / 1e6:.1f} MB in {self._seconds:.1f} s"
        )

    def _store(self) -> Exception | None:
        """Let the storage hold the files that are here now; returns what it raised."""
        began = time.monotonic()
        try:
            if self._storage.writer() != self._name:
                raise StorageError("another command has continued the run there")
            if here := _files_of(self._folder):
                self._copy(here)
            elif not self._stored:  # the run has failed at once, and removed its folder
                self._storage.remove(posixpath.dirname(WRITER), folder=True)
        except Exception as error:  # whatever a storage raises: the run goes on
            return error
        finally:
            self._seconds += time.monotonic() - began
            self._note()
        return None

    def _note(self) -> None:
        write_json(self._record, {"name": self._name, "files": self._stored})

    def _copy(self, here: Mapping[str, Stamp]) -> None:
        """Records come before the checkpoint that was made after them, and its files before the mark that makes it one."""
        changed = [name for name, stamp in here.items() if self._stored.get(name) != stamp]
        for mark in [name for name in changed if is_mark(name) and name in self._stored]:
            self._remove(mark)  # a checkpoint of whose files some are, is none until they are there
        with ThreadPoolExecutor(COPIES) as pool:
            for _, names in groupby(sorted(changed, key=_rank), _rank):
                list(pool.map(lambda name: self._put(name, here[name]), names))
        gone = self._stored.keys() - here.keys()
        for name in sorted(gone, key=lambda name: not is_mark(name)):
            self._remove(name)
        for folder in {"/".join(name.split("/")[:2]) for name in gone if name.startswith("checkpoints/")}:
            if not (self._folder / folder).exists():
                self._storage.remove(folder, folder=True)

    def _put(self, name: str, stamp: Stamp) -> None:
        try:
            self._storage.put(self._folder / name, name)
        except FileNotFoundError:
            if (self._folder / name).exists():  # else it was removed meanwhile
                raise
            return
        self._stored[name] = stamp
        self._files, self._bytes = self._files + 1, self._bytes + stamp[0]

    def _remove(self, name: str) -> None:
        self._storage.remove(name)
        del self._stored[name]

    def _missing(self) -> str:
        """Number and size of the files that the storage lacks, and where in the run's folder they are."""
        lacking = {name: stamp[0] for name, stamp in _files_of(self._folder).items() if self._stored.get(name) != stamp}
        entries = sorted({"/".join(name.split("/")[: 1 + name.startswith("checkpoints/")]) for name in lacking})
        several = "" if len(lacking) == 1 else "s"
        return f"{len(lacking)} file{several}, {sum(lacking.values()) / 1e6:.1f} MB ({', '.join(entries)})"


def _rank(name: str) -> int:
    """Place of a file in the order in which files are copied."""
    return 3 if name == RUN_FILE else 2 if is_mark(name) else 1 if name.startswith("checkpoints/") else 0


def _is_cut(name: str, whole: Sequence[str]) -> bool:
    """Whether a file is of a checkpoint that was not copied to the storage to its end."""
    parts = PurePosixPath(name).parts
    return parts[0] == "checkpoints" and parts[1].isdecimal() and parts[1] not in whole


def _files_of(folder: Path) -> dict[str, Stamp]:
    """The files that belong on a storage."""
    found = {}
    for path in folder.rglob("*"):
        parts = path.relative_to(folder).parts
        unfinished = any(part.endswith((".partial", ".unfinished")) for part in parts)
        if not unfinished and path.name != LOCK_FILE:
            with suppress(FileNotFoundError):  # removed meanwhile
                if path.is_file():
                    found["/".join(parts)] = stamp_of(path)
    return found
