"""A full file system is told from other failures, whoever met it."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from trial_ray.errors import CheckpointError
from trial_ray.runs.ownership import storage_error

FOLDER = Path("/runs/one")
FULL = OSError(errno.ENOSPC, "No space left on device")


def raised_from(cause: BaseException) -> BaseException:
    error = CheckpointError("000003 could not be written")
    error.__cause__ = cause
    return error


def while_handling(cause: BaseException) -> BaseException:
    error = ValueError("I/O operation on closed file")
    error.__context__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        FULL,
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
        while_handling(raised_from(FULL)),
        RuntimeError("ray::learner()\n  File ..., line 1\nOSError: [Errno 28] No space left on device"),
    ],
)
def test_a_full_disk_is_found_behind_what_it_caused(error):
    found = storage_error(error, FOLDER)
    assert "no space left for the run in /runs/one" in str(found)
    assert "continue with --resume /runs/one" in str(found)


@pytest.mark.parametrize(
    "error", [OSError(errno.EACCES, "Permission denied"), ValueError("x"), while_handling(KeyError("a"))]
)
def test_other_failures_are_left_alone(error):
    assert storage_error(error, FOLDER) is None
