"""Progress of a process, its stacks if it hangs, and the release of its memory."""

import os
import signal
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import replace

import psutil
import pytest
import ray
from commands import run_python, wait_until

from trial_ray.process import Progress, advance, announce, own_count, runs_here
from trial_ray.termination import termination_as_interrupt


@pytest.mark.actors
def test_an_actor_that_hangs_writes_its_stacks(ray_session, tmp_path):
    log = tmp_path / "stderr"
    log.touch()

    @ray.remote(num_cpus=0)
    class Actor:
        def __init__(self):
            os.dup2(os.open(log, os.O_WRONLY), 2)
            announce(stacks_after_s=0.5)

        def hanging_step(self):
            threading.Event().wait()

    actor = Actor.remote()
    actor.hanging_step.remote()
    wait_until(lambda: "in hanging_step" in log.read_text(), within_s=120)
    ray.kill(actor)


def test_a_later_process_with_the_same_id_does_not_count():
    with subprocess.Popen(["sleep", "600"]) as process:
        found = psutil.Process(process.pid)
        progress = Progress("node", process.pid, found.create_time(), 0)
        assert runs_here(progress)
        assert not runs_here(replace(progress, started=progress.started - 60))
        process.kill()
        while found.status() != psutil.STATUS_ZOMBIE:
            pass
        assert not runs_here(progress)
    assert not runs_here(progress)


def test_a_swallowed_interrupt_is_raised_again():
    with termination_as_interrupt():
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        with pytest.raises(KeyboardInterrupt):
            advance()
    before = own_count()
    advance()
    assert own_count() == before + 1


HOLES = """
import resource
from pathlib import Path
from trial_ray.process import release_memory

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


def test_freed_memory_is_returned_to_the_system():
    done = run_python(HOLES)
    assert done.returncode == 0, done.stderr
    automatically, released = map(int, done.stdout.split())
    assert automatically < 100e6 < released
