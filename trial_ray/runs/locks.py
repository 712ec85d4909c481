"""Lock that lets only one command at a time write into a folder."""

from __future__ import annotations

import errno
import logging
import os
import shlex
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from trial_ray.errors import FolderInUseError, UserInputError
from trial_ray.files import require_new_folder, storage_error
from trial_ray.secrets import redacted

LOCK_FILE = ".lock"
"""Name of the lock file; a lock file that a killed process left does not lock the folder."""
WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP)
"""Error numbers of file systems that do not support locks."""

logger = logging.getLogger(__name__)


@contextmanager
def folder_lock(folder: Path, command: Sequence[str]) -> Iterator[None]:
    """Lock a folder, which is created if missing, until the context exits or this process ends.

    The operating system releases the lock when the process ends, also after ``kill -9``. Readers need no lock. On a file system
    without locks, a warning is logged.

    Args:
        folder: folder to write into.
        command: the command line, shown in the error of a second command.

    Raises:
        FolderInUseError: another command has locked the folder.
        UserInputError: the folder cannot be written.
        StorageError: the folder's file system is full.
    """
    created, path, process = not folder.exists(), folder / LOCK_FILE, os.getpid()
    words = shlex.join(redacted(word) for word in command)
    lock = FileLock(path, thread_local=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
        # Describe this process for the error of a second command.
        path.write_text(
            f"process {process} on {socket.gethostname()} since {time.strftime('%Y-%m-%dT%H:%M:%S%z')} ({words})",
            encoding="utf-8",
            errors="replace",
        )
    except Timeout as error:
        holder = ""
        with suppress(OSError):
            holder = path.read_text(encoding="utf-8", errors="replace")
        raise FolderInUseError(
            f"{folder} is in use by {holder or 'another process, which has not written its name yet'}. Wait until it has ended, or "
            "stop it; report, inspect, evaluate and export can read the folder meanwhile."
        ) from error
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise storage_error(error, folder) or UserInputError(f"{folder} cannot be written: {error}.") from error
        logger.warning("the file system of %s has no locks (%s): start no second command on this folder", folder, error)
    try:
        yield
    finally:
        if os.getpid() == process:  # A forked child must not release the lock of its parent.
            path.unlink(missing_ok=True)  # Remove the lock file before another process can lock it.
            lock.release()
            if created:
                with suppress(OSError):  # Keep a folder that is not empty.
                    folder.rmdir()


def require_free_folder(folder: Path, instead: str) -> None:
    """Reject a folder that another command has locked, or that :func:`trial_ray.files.require_new_folder` rejects.

    Args:
        folder: the new folder.
        instead: alternative that the error message suggests after "Name a new folder".

    Raises:
        FolderInUseError: another command has locked the folder.
        UserInputError: the folder is not empty, or cannot be created.
    """
    if (folder / LOCK_FILE).exists():
        with folder_lock(folder, ()):
            pass
    require_new_folder(folder, instead)
