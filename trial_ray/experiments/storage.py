"""A file system that is full, told from other failures: whoever met it, and however it is worded."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

from trial_ray.errors import StorageError

FULL = (errno.ENOSPC, errno.EDQUOT)


def storage_error(error: BaseException, folder: Path) -> StorageError | None:
    """What to tell of an error that a full file system caused; ``None`` of any other.

    Args:
        error: as it reached the run; what it came of is looked at too, in whichever process that was.
        folder: the run's.
    """
    for cause in _causes(error):
        if (getattr(cause, "errno", None) in FULL and isinstance(cause, OSError)) or _says_so(cause):
            return StorageError(
                f"There is no space left for the run in {folder} ({_last_line(cause)}). Free some, then continue with "
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


def _last_line(error: BaseException) -> str:
    """Of Ray's errors the last one is what was raised, below the traceback."""
    return ((str(error).strip() or type(error).__name__).splitlines()[-1]).strip()
