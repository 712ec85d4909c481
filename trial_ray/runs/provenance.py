"""Whether a folder was written by this user on this machine, which decides whether the pickles in it are loaded.

A pickle runs whatever program its author put into it. Owner and permissions say nothing: a downloaded folder belongs to whom
downloaded it. So what a run writes is signed with a key that no other user or machine has.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import stat
from contextlib import suppress
from functools import cache
from pathlib import Path

from trial_ray.errors import CheckpointError
from trial_ray.files import read_json, write_json

KEY_FILE = "signing.key"
MARK = "origin.json"
"""In a folder that this user began."""
_KEY_BYTES = 32

logger = logging.getLogger(__name__)


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
    from trial_ray.warmstart.cache import cache_root  # whose package imports torch, which no `--help` waits for

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
