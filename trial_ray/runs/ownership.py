"""Whose a folder is: the lock of the command that writes into it, the space left for it, the signature of the user who began it.

The signature decides whether the pickles in a folder are loaded. A pickle runs whatever program its author put into it, and owner
and permissions say nothing: a downloaded folder belongs to whom downloaded it. So what a run writes is signed with a key that no
other user or machine has.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import hmac
import logging
import os
import secrets
import shlex
import socket
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from trial_ray.errors import CheckpointError, FolderInUseError, StorageError, UserInputError, first_line
from trial_ray.files import FULL, cache_root, read_json, redacted, write_json

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
            os.write(lock, holder(command).encode(errors="replace"))
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


def holder(command: Sequence[str]) -> str:
    """Description of the command that holds a folder, for the error of a second one."""
    words = shlex.join(redacted(word) for word in command)
    return f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%dT%H:%M:%S%z')} ({words})"


def _leave_to_parent() -> None:
    """In a forked child: its copies of the descriptors would keep the locks when the parent is killed."""
    for lock in _held:
        os.close(lock)
    _held.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


def storage_error(error: BaseException, folder: Path) -> StorageError | None:
    """The typed error for a full file system; ``None`` for any other cause.

    Args:
        error: as it reached the run; what it came of is looked at too, in whichever process that was.
        folder: the run's.
    """
    for cause in _causes(error):
        # Libraries in other languages raise errors of their own, with the system's words in them.
        words = any(os.strerror(number) in str(cause) for number in FULL)
        if words or (isinstance(cause, OSError) and cause.errno in FULL):
            return StorageError(
                f"There is no space left for the run in {folder} ({first_line(cause)}). Free some, then continue with "
                f"--resume {folder}."
            )
    return None


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


# -- signatures -------------------------------------------------------------------------------------------------------------

KEY_FILE = "signing.key"
MARK = "origin.json"
"""In a folder that this user began."""
_KEY_BYTES = 32


def signature(content: bytes) -> str:
    """HMAC-SHA256 of ``content`` with this user's key, hexadecimal."""
    return hmac.new(_key(), content, hashlib.sha256).hexdigest()


def is_signed(content: bytes, found: object) -> bool:
    """Whether ``found`` is what :func:`signature` gives of ``content``."""
    return isinstance(found, str) and hmac.compare_digest(signature(content).encode(), found.encode(errors="replace"))


def sign_folder(folder: Path) -> None:
    """Mark a folder, whose files others go on writing, as one that this user began on this machine."""
    write_json(folder / MARK, {"signature": signature(_identity(folder))})


def require_own_folder(folder: Path) -> None:
    """Check for the mark of :func:`sign_folder`; a copy of the folder, or the folder elsewhere, does not have it.

    Raises:
        CheckpointError: it is not there.
    """
    with suppress(CheckpointError):
        if is_signed(_identity(folder), read_json(folder / MARK).get("signature")):
            return
    raise CheckpointError(
        f"{folder} holds pickles, which can run any program, and may be of somebody else: it was not begun here by this user, or "
        "was moved. Give --trust if you know where it comes from."
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
            "%s cannot be used (%s): checkpoints of this process can be resumed elsewhere with --trust alone",
            path,
            error,
        )
        return _key_of_this_process()


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise PermissionError("other users can read or change it; remove it, and a new one is made")
        key = file.read()
    if len(key) != _KEY_BYTES:
        raise OSError(f"it has {len(key)} bytes, {_KEY_BYTES} were expected; remove it, and a new one is made")
    return key


def _made(path: Path) -> bytes:
    """A new key; of processes that make one at the same time, all take the same."""
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
