"""The lock of a run folder, and the space left for it."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shlex
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from trial_ray.errors import FolderInUseError, StorageError, UserInputError, first_line
from trial_ray.files import redacted

LOCK_FILE = ".lock"
"""Name of the lock file; one that a killed process left locks nothing."""
WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)

logger = logging.getLogger(__name__)
_held: set[int] = set()
"""Descriptors of this process's locks."""


@contextmanager
def folder_lock(folder: Path, command: Sequence[str]) -> Iterator[None]:
    """Hold a folder, which is made where it is missing, until the context is left or this process dies in whatever way.

    The lock is the operating system's (``flock``): it ends with the process, also by ``kill -9``. Readers need none. On a file
    system without locks a warning is logged.

    Args:
        folder: that is written into.
        command: the command line, which a second command is refused with.

    Raises:
        FolderInUseError: another command holds the folder.
        UserInputError: the folder cannot be written.
        StorageError: its file system is full.
    """
    made = not folder.exists()
    path = folder / LOCK_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _locked(path)
    except OSError as error:
        raise storage_error(error, folder) or UserInputError(f"{folder} cannot be written: {error}.") from error
    _held.add(lock)
    try:
        with suppress(OSError):  # the lock holds without the note of who has it
            os.write(lock, _holder(command).encode(errors="replace"))
        yield
    finally:
        if lock in _held:  # else this is a fork, and the lock its parent's
            _held.remove(lock)
            if _is_file(lock, path):
                path.unlink(missing_ok=True)
            os.close(lock)
            if made:
                with suppress(OSError):  # it is not empty
                    folder.rmdir()


def _locked(path: Path) -> int:
    """Descriptor of the file under that name, locked and empty."""
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(lock, path)
            if _is_file(lock, path):  # else its last holder has removed it meanwhile
                os.ftruncate(lock, 0)
                return lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def _lock(lock: int, path: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = (
            os.pread(lock, 1 << 16, 0).decode(errors="replace") or "another process, which has not written its name yet"
        )
        raise FolderInUseError(
            f"{path.parent} is in use by {holder}. Wait until it has ended, or stop it; to read the folder (report, "
            "inspect, evaluate, export) is possible meanwhile."
        ) from error
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
        logger.warning(
            "the file system of %s has no locks (%s): start no second command on this folder", path.parent, error
        )


def _is_file(lock: int, path: Path) -> bool:
    """Whether the open file is still the one under that name."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(lock), path.stat())
    return False


def _holder(command: Sequence[str]) -> str:
    words = shlex.join(redacted(word) for word in command)
    return f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%dT%H:%M:%S%z')} ({words})"


def _leave_to_parent() -> None:
    """In a forked child: its copies of the descriptors would keep the locks when the parent is killed."""
    for lock in _held:
        os.close(lock)
    _held.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


FULL = (errno.ENOSPC, errno.EDQUOT)


def storage_error(error: BaseException, folder: Path) -> StorageError | None:
    """The typed error for a full file system; ``None`` for any other cause.

    Args:
        error: as it reached the run; what it came of is looked at too, in whichever process that was.
        folder: the run's.
    """
    for cause in _causes(error):
        if (getattr(cause, "errno", None) in FULL and isinstance(cause, OSError)) or _says_so(cause):
            return StorageError(
                f"There is no space left for the run in {folder} ({first_line(cause)}). Free some, then continue with "
                f"--resume {folder}."
            )
    return None


def _says_so(error: BaseException) -> bool:
    """Libraries in other languages raise errors of their own, with the system's words in them."""
    return any(os.strerror(number) in str(error) for number in FULL)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, what it was raised from, what was being handled meanwhile, and what Ray handed over; each once."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        found = waiting.pop()
        if isinstance(found, BaseException) and id(found) not in seen:
            seen.add(id(found))
            yield found
            waiting += [found.__context__, found.__cause__, getattr(found, "cause", None)]
