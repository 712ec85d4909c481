"""A full file system is distinguished from other failures, in whichever process it occurred."""

import errno
from pathlib import Path

import pytest

from trial_ray.files import storage_error

FULL = OSError(errno.ENOSPC, "No space left on device")


def raised_from(cause):
    error = ValueError("000003 could not be written")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "full"),
    {
        FULL: True,
        OSError(errno.EDQUOT, "Disk quota exceeded"): True,
        raised_from(raised_from(FULL)): True,
        RuntimeError("ray::learner()\nOSError: [Errno 28] No space left on device"): True,
        OSError(errno.EACCES, "Permission denied"): False,
        raised_from(KeyError("a")): False,
    }.items(),
)
def test_a_full_disk_is_recognised_in_the_causes(error, full):
    assert ("--resume s3://run" in str(storage_error(error, Path("/run"), "s3://run"))) == full
    assert ("--resume /run" in str(storage_error(error, Path("/run")))) == full
