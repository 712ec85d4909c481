"""What one process can find out about another, its state and its stacks; and that it gives back memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from trial_ray.process_reports import advance, describe_processes, is_announced, own_count
from trial_ray.termination import termination_as_interrupt

CHILD = """
import time
from trial_ray.process_reports import announce
announce()
def hanging_step():
    print(flush=True)
    while True:
        time.sleep(600)
hanging_step()
"""


@pytest.fixture
def child():
    with subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        yield process
        process.kill()


def test_a_process_that_ends_while_it_is_looked_at_is_said_to_have_ended(child, monkeypatch):
    kill = os.kill

    def kill_too_late(pid, number):
        kill(child.pid, signal.SIGKILL)
        child.wait(timeout=30)
        kill(pid, number)

    monkeypatch.setattr(os, "kill", kill_too_late)
    told = describe_processes([child.pid])[child.pid]
    monkeypatch.undo()
    assert told == "gone"


def test_stacks_are_told_again_and_again_and_leave_nothing(child, monkeypatch):
    monkeypatch.setattr("trial_ray.process_reports.STACKS_TIMEOUT_S", 60.0)
    assert [describe_processes([child.pid])[child.pid].count("in hanging_step") for _ in range(3)] == [1, 1, 1]
    assert is_announced(child.pid)


def test_a_process_that_is_stopped_or_gone_or_another_is_not_asked(child):
    os.kill(child.pid, signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    assert describe_processes([child.pid])[child.pid] == "stopped; it writes no stacks"
    child.kill()
    child.wait(timeout=30)
    assert describe_processes([child.pid])[child.pid] == "gone"
    assert not is_announced(child.pid)
    with subprocess.Popen(["sleep", "600"]) as other:
        try:
            assert describe_processes([other.pid])[other.pid].endswith("; it writes no stacks")
            assert other.poll() is None
        finally:
            other.kill()


def test_units_of_work_are_counted():
    before = own_count()
    advance("step")
    assert own_count() == before + 1


def test_a_termination_that_a_library_swallows_ends_the_work_all_the_same():
    with termination_as_interrupt():
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        with pytest.raises(KeyboardInterrupt):
            advance("turn")
    advance("turn")


HOLES = """
import resource
from pathlib import Path
from trial_ray.process_reports import release_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

blocks = [bytes(100_000) for _ in range(2_000)]
kept = blocks[::100]
full = resident()
del blocks
freed = resident()
release_memory()
print(full - freed, full - resident())
"""


def test_freed_memory_goes_back_to_the_system():
    found = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, timeout=120, check=True)
    by_itself, released = map(int, found.stdout.split())
    assert by_itself < 100e6 < released
