"""Each file of fault tests leaves no process and no shared memory."""

import os
from collections.abc import Iterator
from pathlib import Path

import fault_checks
import pytest

SHARED_MEMORY = Path("/dev/shm")
MARKED = pytest.StashKey[tuple[str, set[str]]]()


@pytest.fixture(scope="session", autouse=True)
def marked(request: pytest.FixtureRequest, own_home: Path) -> Iterator[None]:
    """Mark the processes of these tests."""
    before = set(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.is_dir() else set()
    request.config.stash[MARKED] = fault_checks.mark_processes(), before
    yield
    del os.environ[fault_checks.MARK]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Check after the last test of a file that no process and no shared memory is left."""
    yield
    if nextitem is not None and nextitem.path == item.path:
        return
    mark, before = item.config.stash[MARKED]
    left = fault_checks.processes_left(mark)
    if SHARED_MEMORY.is_dir():
        left += sorted(
            name for name in {*os.listdir(SHARED_MEMORY)} - before if not name.startswith(("plasma", "sem."))
        )
    assert not left, f"left behind: {left}"
