"""Ownership of a folder: the lock of the command that writes into it, full file systems, and the signature of the user.

The signature decides whether the pickles in a folder are loaded. A pickle can run any program, and owner and permissions prove
nothing: a downloaded folder belongs to the user who downloaded it. Therefore, files that a run writes are signed with a key that
no other user or machine has.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import logging
import os
import secrets
import shlex
import socket
import stat
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from filelock import FileLock, Timeout

from trial_ray.errors import CheckpointError, FolderInUseError, StorageError, UserInputError
from trial_ray.files import FULL, cache_root, read_json, redacted, require_new_folder, write_json

LOCK_FILE = ".lock"
"""Name of the lock file; a file left by a killed process locks nothing."""
WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP)

logger = logging.getLogger(__name__)


@contextmanager
def folder_lock(folder: Path, command: Sequence[str]) -> Iterator[None]:
    """Lock a folder, which is created if missing, until the context exits or this process dies in any way.

    The operating system releases the lock when the process ends, also after ``kill -9``. Readers need no lock. On a file system
    without locks, a warning is logged.

    Args:
        folder: folder to write into.
        command: the command line, shown in the error of a second command.

    Raises:
        FolderInUseError: another command has locked the folder.
        UserInputError: the folder cannot be written.
        StorageError: its file system is full.
    """
    made, path, process = not folder.exists(), folder / LOCK_FILE, os.getpid()
    lock = FileLock(path, thread_local=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
        path.write_text(holder(command), encoding="utf-8", errors="replace")
    except Timeout as error:
        found = ""
        with suppress(OSError):
            found = path.read_text(encoding="utf-8", errors="replace")
        raise FolderInUseError(
            f"{folder} is in use by {found or 'another process, which has not written its name yet'}. Wait until it has ended, or "
            "stop it; report, inspect, evaluate and export can read the folder meanwhile."
        ) from error
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise storage_error(error, folder) or UserInputError(f"{folder} cannot be written: {error}.") from error
        logger.warning("the file system of %s has no locks (%s): start no second command on this folder", folder, error)
    try:
        yield
    finally:
        if os.getpid() == process:  # else this is a fork, and the lock its parent's
            path.unlink(missing_ok=True)  # before others can lock it
            lock.release()
            if made:
                with suppress(OSError):  # it is not empty
                    folder.rmdir()


def require_free_folder(folder: Path, instead: str) -> None:
    """Reject the name of a new folder that another command writes into, or that ``files.require_new_folder`` rejects.

    Raises:
        FolderInUseError: another command has locked the folder.
        UserInputError: the folder is not empty, or cannot be created.
    """
    if (folder / LOCK_FILE).exists():
        with folder_lock(folder, ()):
            pass
    require_new_folder(folder, instead)


def holder(command: Sequence[str]) -> str:
    """Describe the command that has locked a folder, for the error of a second command."""
    words = shlex.join(redacted(word) for word in command)
    return f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%dT%H:%M:%S%z')} ({words})"


def storage_error(error: BaseException, folder: Path, address: str = "") -> StorageError | None:
    """Return the typed error for a full file system; ``None`` for any other cause.

    Args:
        error: the error that reached the run, with its causes.
        folder: the run's folder.
        address: path or URI by which the run is continued; empty: the folder.
    """
    # Causes are of other processes, too, and libraries in other languages raise errors of their own with the system's words.
    text = "".join(traceback.format_exception(error))
    for words in map(os.strerror, FULL):
        if words in text:
            return StorageError(
                f"There is no space left for the run in {folder} ({words}). Free some, then continue with "
                f"--resume {address or folder}."
            )
    return None


# -- signatures -------------------------------------------------------------------------------------------------------------

KEY_FILE = "signing.key"
MARK = "origin.json"
"""Name of the file that marks a folder as started by this user."""
_KEY_BYTES = 32


def signature(content: bytes) -> str:
    """Return the HMAC-SHA256 of ``content`` with this user's key, hexadecimal."""
    return hmac.new(_key(), content, hashlib.sha256).hexdigest()


def is_signed(content: bytes, found: object) -> bool:
    """Return True if ``found`` is the :func:`signature` of ``content``."""
    return isinstance(found, str) and hmac.compare_digest(signature(content).encode(), found.encode(errors="replace"))


def sign_folder(folder: Path) -> None:
    """Mark a folder as started by this user on this machine, for a folder with files that other programs continue to write."""
    write_json(folder / MARK, {"signature": signature(_identity(folder))})


def require_own_folder(folder: Path) -> None:
    """Check for the mark of :func:`sign_folder`; a copied or moved folder has no valid mark.

    Raises:
        CheckpointError: there is no valid mark.
    """
    with suppress(CheckpointError):
        if is_signed(_identity(folder), read_json(folder / MARK).get("signature")):
            return
    raise CheckpointError(
        f"{folder} has pickles, which can run any program, and may come from another user: it was not started here by this user, "
        "or was moved. Give --trust if you know where it comes from."
    )


def _identity(folder: Path) -> bytes:
    return f"{folder.resolve()}\0{folder.stat().st_ino}".encode(errors="surrogateescape")


def _key() -> bytes:
    path = Path(KEY_FILE)
    try:
        path = cache_root() / KEY_FILE
        return _read(path) if path.exists() else _made(path)
    except (OSError, RuntimeError) as error:  # the latter: there is no home
        logger.warning(
            "%s cannot be used (%s): checkpoints of this process can be resumed elsewhere only with --trust",
            path,
            error,
        )
        return _key_of_this_process()


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise PermissionError("other users can read or change it; remove it, and a new one is created")
        key = file.read()
    if len(key) != _KEY_BYTES:
        raise OSError(f"it has {len(key)} bytes, {_KEY_BYTES} were expected; remove it, and a new one is created")
    return key


def _made(path: Path) -> bytes:
    """Create a new key; processes that do so at the same time all get the same key."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(beside, path)
        except FileExistsError:
            pass
        except OSError:  # a file system without links
            os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    return _read(path)


@cache
def _key_of_this_process() -> bytes:
    return secrets.token_bytes(_KEY_BYTES)
