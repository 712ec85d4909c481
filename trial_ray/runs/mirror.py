"""Keeps a run on a storage: its folder on this machine is mirrored there while the run goes on."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import IO, Any

from trial_ray.errors import CheckpointError, StorageError, UserInputError, first_line
from trial_ray.files import read_json, require_new_folder, set_aside, write_folder, write_json
from trial_ray.runs.checkpoints import CHECKPOINT_MARK, RUN_FILE
from trial_ray.runs.claims import Claim
from trial_ray.runs.ownership import LOCK_FILE, folder_lock
from trial_ray.runs.storage import CHUNK, Stamp, Storage, download, is_mark, stamp_of, whole_checkpoints

PAUSE_S = 10.0
"""Seconds between looks for files that changed."""
LONGEST_PAUSE_S = 60.0
"""Seconds between attempts while the storage fails, at most."""
FINISH_S = 600.0
"""How long nothing may reach the storage at the end of a run before the run counts as failed."""
_UNFINISHED = (".partial", ".unfinished")


def local_folder(place: Path | str) -> Path:
    """Where a run is on this machine.

    Args:
        place: of the run: a path, or a URI as text.

    Raises:
        UserInputError: the URI cannot be opened.
    """
    return Storage.open(place).cached("runs") if isinstance(place, str) else place.resolve()


@contextmanager
def mirrored(place: Path | str, *, resume: bool, command: Sequence[str], tell: Callable[[str], None]) -> Iterator[None]:
    """While entered, the :func:`local_folder` of a run at a URI is mirrored there, and no other command writes there.

    A storage that fails holds nothing up: it is tried again, and what it lacks follows. Records come before the checkpoint that was
    made after them, and a checkpoint's files before the mark that makes it one, so that what is there can be continued at any time.

    Args:
        place: of the run: a path, for which nothing is done, or a URI as text.
        resume: whether the run there is to be continued; it is copied here, unless this machine wrote it last.
        command: the command line, which a second command is refused with.
        tell: prints a line.

    Raises:
        FolderInUseError: another command writes there.
        CheckpointError: there is no run to continue.
        UserInputError: the storage cannot be used, or holds something where a run is to begin.
        StorageError: the run has ended, and could not be brought there.
    """
    if not isinstance(place, str):
        yield
        return
    storage, folder = Storage.open(place), local_folder(place)
    record = folder.with_name(f".{folder.name}.mirror")
    with folder_lock(record, command):
        with storage.answering():
            mirror = _Mirror(storage, folder, record, tell)
            mirror.begin(resume, command)
        try:
            yield
        except BaseException as error:
            try:
                mirror.finish()
            except StorageError as behind:
                error.add_note(str(behind))
            raise
        mirror.finish()


class _Mirror:
    """A thread that copies what changed.

    Args:
        storage: of the run.
        folder: of the run on this machine.
        record: folder that keeps what the storage has.
        tell: prints a line.
    """

    def __init__(self, storage: Storage, folder: Path, record: Path, tell: Callable[[str], None]) -> None:
        self._storage, self._folder, self._record, self._tell = storage, folder, record, tell
        self._known: dict[str, Stamp | None] = {}
        """Files of the storage, with the stamps that they had here; ``None``: of a file that is not here."""
        self._new = False
        self._finishing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)
        self._error: Exception | None = None
        self._failing_since: float | None = None
        self._copied_at = time.monotonic()
        self._files, self._bytes, self._seconds = 0, 0, 0.0

    def begin(self, resume: bool, command: Sequence[str]) -> None:
        """Claim the run, copy it here where that is needed, and start to mirror it."""
        self._claim = Claim(self._storage, self._record, command)
        self._claim.take()
        try:
            there = self._storage.files()
            if there and not resume:
                raise UserInputError(
                    f"{self._storage.uri} is not empty, it holds {min(there)}. Name a new folder, or continue with --resume."
                )
            self._new = not resume
            if resume:
                self._resume(there)
            else:
                require_new_folder(self._folder, f", or copy what it holds with --resume {self._storage.uri}")
            self._claim.hold()
            self._note()
        except BaseException:
            self._claim.release()
            raise
        self._thread.start()

    def _resume(self, there: Mapping[str, Any]) -> None:
        record, here = self._record / "files.json", (self._folder / RUN_FILE).is_file()
        if here and record.exists() and (self._claim.was_last or not there):
            for name, stamp in read_json(record)["files"].items():
                if name in there:
                    self._known[name] = (stamp[0], stamp[1]) if stamp and stamp[0] == there[name].size else None
            return
        if RUN_FILE not in there:
            raise CheckpointError(f"{self._storage.uri} is not a run folder (it has no {RUN_FILE}).")
        record.unlink(missing_ok=True)
        if self._folder.exists():
            aside = set_aside(self._folder, "replaced")
            self._tell(f"another machine has continued the run; what this one had of it is now {aside}")
        whole = whole_checkpoints(there)
        files = {name: info for name, info in there.items() if not _is_cut(name, whole)}
        write_folder(self._folder, lambda partial: download(self._storage, partial, files))
        self._known = dict.fromkeys(there) | _files_of(self._folder)

    def finish(self) -> None:
        """Copy what the storage lacks still, and let others write there.

        Raises:
            StorageError: that was not possible.
        """
        self._copied_at = time.monotonic()
        self._finishing.set()
        while self._thread.is_alive() and time.monotonic() - self._copied_at < FINISH_S:
            self._thread.join(0.1)
        if self._thread.is_alive() or self._error:
            reason = first_line(self._error) if self._error else "it does not answer"
            raise StorageError(
                f"{self._storage.uri} is not up to date: {reason}. It lacks {self._missing()}. The whole run is in {self._folder}; "
                f"--resume {self._storage.uri} on this machine goes on from there, and copies it."
            )
        self._tell(
            f"mirrored to {self._storage.uri}: {self._files} files, {self._bytes / 1e6:.1f} MB in {self._seconds:.1f} s"
        )

    def _run(self) -> None:
        failures = 0
        while True:
            pause = min(PAUSE_S * 2 ** max(0, failures - 1), LONGEST_PAUSE_S)
            finishing = self._finishing.wait(pause)
            began = time.monotonic()
            try:
                self._claim.renew()
                self._mirror()
                if finishing:
                    self._claim.release()
            except StorageError as error:
                self._error = error
                self._tell(f"warning: {self._storage.uri} is not written any more: {error}")
                return
            except Exception as error:  # whatever a storage raises: the run goes on
                failures += 1
                self._note_failure(error)
                if finishing:
                    time.sleep(1.0)
            else:
                failures = 0
                self._seconds += time.monotonic() - began
                self._note_success()
                if finishing:
                    return

    def _note_failure(self, error: Exception) -> None:
        self._error = error
        if self._failing_since is None:
            self._failing_since = time.monotonic()
            self._tell(
                f"warning: {self._storage.uri} cannot be written: {first_line(error)}. It lacks {self._missing()}, which are in "
                f"{self._folder}; the run goes on, and tries again"
            )

    def _note_success(self) -> None:
        self._error = None
        if self._failing_since is not None:
            self._tell(f"{self._storage.uri} is up to date again, {time.monotonic() - self._failing_since:.0f} s later")
            self._failing_since = None

    def _missing(self) -> str:
        sizes = [stamp[0] for name, stamp in _files_of(self._folder).items() if self._known.get(name) != stamp]
        return f"{len(sizes)} file{'' if len(sizes) == 1 else 's'}, {sum(sizes) / 1e6:.1f} MB"

    # -- files ---------------------------------------------------------------------------------------------------------

    def _mirror(self) -> None:
        """Let the storage hold the files that are here now."""
        if not self._folder.is_dir() and not (self._new and self._finishing.is_set()):
            return  # a session that fails before its first iteration removes its folder
        here = _files_of(self._folder)
        changed = self._changed(here)
        for name in changed:
            self._copy(name, here[name])
        gone = sorted(self._known.keys() - here.keys(), key=_rank, reverse=True)
        whole = whole_checkpoints(name for name, stamp in here.items() if self._known.get(name) == stamp)
        for name in gone:
            # Checkpoints may be removed here before they are copied: the last one there stays until another one is.
            if whole or not here or not name.startswith("checkpoints/"):
                self._remove(name)
        if changed or gone:
            self._note()

    def _changed(self, here: Mapping[str, Stamp]) -> list[str]:
        """Names of the files to copy, in order; a checkpoint of whose files some are, is none until they are there."""
        changed = {name for name, stamp in here.items() if self._known.get(name) != stamp}
        marks = {f"{'/'.join(name.split('/')[:2])}/{CHECKPOINT_MARK}" for name in changed if _rank(name)[0] == 1}
        for mark in marks & self._known.keys():
            self._storage.remove(mark)
            del self._known[mark]
        first = {RUN_FILE} - self._known.keys()  # without it nothing there can be read
        return sorted(changed | (marks & here.keys()), key=lambda name: (name not in first, _rank(name)))

    def _copy(self, name: str, stamp: Stamp) -> None:
        try:
            file = (self._folder / name).open("rb")
        except FileNotFoundError:
            return  # removed meanwhile
        with file:
            self._storage.write(name, self._pieces(file))
        self._known[name] = stamp
        self._files, self._bytes = self._files + 1, self._bytes + stamp[0]

    def _pieces(self, file: IO[bytes]) -> Iterator[bytes]:
        while piece := file.read(CHUNK):
            yield piece
            self._copied_at = time.monotonic()
            self._claim.renew()

    def _remove(self, name: str) -> None:
        if name not in self._known:
            return
        folders = [
            str(each) for each in PurePosixPath(name).parents if each.name and not (self._folder / each).exists()
        ]
        if folders and not is_mark(name):
            self._storage.remove(folders[-1], folder=True)
            self._known = {each: stamp for each, stamp in self._known.items() if not each.startswith(f"{folders[-1]}/")}
        else:
            self._storage.remove(name)
            del self._known[name]

    def _note(self) -> None:
        write_json(self._record / "files.json", {"files": self._known})


def _rank(name: str) -> tuple[int, int, bool, str]:
    """Place of a file in the order in which files are copied: of checkpoints the newest first, which is kept the longest."""
    folder, _, inside = name.partition("/")
    if folder != "checkpoints":
        return 2 * (name == RUN_FILE), 0, False, name
    number = inside.partition("/")[0]
    return 1, -int(number) if number.isdecimal() else 0, is_mark(name), name


def _is_cut(name: str, whole: Sequence[str]) -> bool:
    """Whether a file is of a checkpoint that was not copied to the storage to its end."""
    parts = PurePosixPath(name).parts
    return parts[0] == "checkpoints" and parts[1].isdecimal() and parts[1] not in whole


def _files_of(folder: Path) -> dict[str, Stamp]:
    """The files that belong on a storage. Checkpoints are looked for first: what was recorded before them is then found too."""
    found: dict[str, Stamp] = {}
    for top in (folder / "checkpoints", folder):
        for path, folders, names in os.walk(top):
            inside = Path(path).relative_to(folder)
            folders[:] = [
                each
                for each in folders
                if not each.endswith(_UNFINISHED) and not (path == str(folder) and each == "checkpoints")
            ]
            for name in names:
                if name != LOCK_FILE and not name.endswith(_UNFINISHED):
                    with suppress(FileNotFoundError):
                        found[(inside / name).as_posix()] = stamp_of(Path(path, name))
    return found
