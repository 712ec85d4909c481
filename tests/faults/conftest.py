"""Each file of fault tests leaves no process and no shared memory."""

import os
from pathlib import Path

import fault_checks
import pytest

SHARED_MEMORY = Path("/dev/shm")
MARKED = pytest.StashKey()


def shared_memory():
    return set(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.is_dir() else set()


@pytest.fixture(scope="session", autouse=True)
def marked(request, own_home):
    """Mark the processes of these tests."""
    request.config.stash[MARKED] = fault_checks.mark_processes(), shared_memory()
    yield
    del os.environ[fault_checks.MARK]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    """Check after the last test of a file that no process and no shared memory is left."""
    yield
    if nextitem is not None and nextitem.path == item.path:
        return
    mark, before = item.config.stash[MARKED]
    left = fault_checks.processes_left(mark)
    left += sorted(name for name in shared_memory() - before if not name.startswith(("plasma", "sem.")))
    assert not left, f"left behind: {left}"
