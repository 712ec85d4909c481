"""Each file of fault tests leaves no process and no shared memory."""

import os
import uuid
from pathlib import Path

import fault_checks
import pytest

SHARED_MEMORY = Path("/dev/shm")


def shared_memory():
    return set(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.is_dir() else set()


@pytest.fixture(scope="session", autouse=True)
def memory_before(own_home):
    """Mark the processes of these tests, and return the shared memory of others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(fault_checks.MARK, uuid.uuid4().hex)
        yield shared_memory()


@pytest.fixture(scope="module", autouse=True)
def nothing_left(memory_before):
    """Check after the last test of a file that no process and no shared memory is left."""
    yield
    left = fault_checks.processes_left()
    left += sorted(name for name in shared_memory() - memory_before if not name.startswith(("plasma", "sem.")))
    assert not left
