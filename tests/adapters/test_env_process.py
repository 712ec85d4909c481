"""An environment in a separate process: the same answers, and a hang, a crash or memory growth fails only one rollout."""

import asyncio
import subprocess
import sys
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest
from fake_engines import passes
from faulty_env import TURNS, CountingEnv
from riddle_env import RiddleEnv
from text_games import Script
from user_env import entry_of

from trial_ray.adapters.guarded import GuardedEnv
from trial_ray.adapters.processes import EnvProcesses, ProcessEnv, ProcessLimits
from trial_ray.rollout.episode import play_episode

LIMITS = ProcessLimits(30.0)
COUNTS = Script(["count"] * TURNS)


@pytest.fixture(scope="module")
def processes():
    started = EnvProcesses()
    yield started
    server = started._server.pid
    started.close()
    assert not psutil.pid_exists(server)


@pytest.fixture
def make(processes):
    made = []

    def make(limits=LIMITS, **config):
        made.append(ProcessEnv(entry_of(CountingEnv, config), (), processes, limits))
        return made[-1]

    yield make
    for env in made:
        env.close()


def begin(env):
    """Begin an episode of the task "two"."""
    asyncio.run(env.reset("two", 0))


def children(env):
    """Return the processes of all environments."""
    return {*psutil.Process(env._processes._server.pid).children()}


def newest(env):
    """Return the newest process; creation times have steps of 10 ms."""
    return max(children(env), key=lambda child: (child.create_time(), child.pid))


def gone(*ended):
    return psutil.wait_procs(ended, timeout=60)[1] == []


def test_a_process_answers_what_the_environment_does(processes):
    async def ask(env):
        return [
            await answer if asyncio.iscoroutine(answer) else answer
            for action in ("red", "blau \ud800 \x00 \u202e")
            for answer in (env.reset("7", seed=3), env.walkthrough(), env.step(action))
        ]

    entry = entry_of(RiddleEnv, {"words": ("red", "blue")}, success=1.0)
    with closing(ProcessEnv(entry, (), processes, LIMITS)) as there:
        assert asyncio.run(ask(there)) == asyncio.run(ask(GuardedEnv(entry)))


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("step[0]=huge", "texts of 50,000,032 characters; expected at most 2,000,000"),
        ("step_exits", "SystemExit: 3"),
        ("step_killed", "its process ended by signal SIGKILL, as the system does when memory is short"),
        ("step_grows", "MemoryError"),
    ],
)
def test_a_fault_fails_the_rollout_and_ends_the_process(make, fault, cause):
    env = make(ProcessLimits(30.0, memory_gb=0.5), fault=fault)
    trajectory = asyncio.run(play_episode(env, "two", COUNTS))
    assert trajectory.error.startswith(f"EnvironmentFaultError: {CountingEnv.ENV_ID}, task 'two', turn 2: ")
    assert cause in trajectory.error
    assert trajectory.failed
    assert env.faulty


def test_hanging_processes_are_ended_while_others_play(make, monkeypatch):
    """The deadlines of the hanging processes pass after the others have played."""
    deadlines, timeout = [], asyncio.timeout

    def controlled(seconds):
        if seconds != 2.0:
            return timeout(seconds)
        deadlines.append(timeout(None))
        return deadlines[-1]

    monkeypatch.setattr("trial_ray.adapters.processes.asyncio.timeout", controlled)

    async def play_all():
        for env in others:
            await env.reset("two", 0)
        kept = children(others[0])
        waiting = [asyncio.create_task(play_episode(env, "two", COUNTS)) for env in hung.values()]
        played = [await play_episode(env, "two", COUNTS) for env in others for _ in range(2)]
        assert not any(task.done() for task in waiting)
        # One process hangs in its reset, three in the step after reset, walkthrough and step.
        while len(deadlines) < 1 + 3 * 4:
            await asyncio.sleep(0.01)
        for deadline in deadlines:
            with suppress(RuntimeError):  # the call has been answered
                deadline.reschedule(0.0)
        return kept, played, await asyncio.gather(*waiting)

    others = [make() for _ in range(2)]
    hung = {
        fault: make(ProcessLimits(2.0), fault=fault)
        for fault in ("reset_hangs", "step_hangs", "step_sleeps", "step_stops")
    }
    kept, played, failed = asyncio.run(play_all())
    assert [trajectory.ended for trajectory in played] == ["terminated"] * 4
    for (fault, env), trajectory in zip(hung.items(), failed, strict=True):
        where = "reset" if fault == "reset_hangs" else "turn 2"
        assert f"{where}: no answer within 2 s; its process was ended" in trajectory.error
        assert env.faulty
        env.close()
    assert gone(*children(others[0]) - kept)


def test_a_cancelled_step_makes_the_process_unusable(make):
    async def cancel_step():
        await env.reset("two", 0)
        await env.step("count")
        stepping = asyncio.create_task(env.step("count"))
        await passes()
        stepping.cancel()
        await asyncio.gather(stepping, return_exceptions=True)

    env = make(fault="step_sleeps")
    asyncio.run(cancel_step())
    assert env.faulty


def test_a_process_that_does_not_close_is_ended(make):
    env = make(fault="close_hangs")
    begin(env)
    process = newest(env)
    env.close()
    assert gone(process)


def test_processes_die_with_the_fork_server_and_a_new_one_is_started(make):
    env = make(fault="step_hangs")
    begin(env)
    server, child = env._processes._server, newest(env)
    server.kill()
    server.wait(timeout=10)
    assert gone(child)
    begin(env)


OWNER = """
import asyncio, sys, time
sys.path.insert(0, "tests/support")
from faulty_env import CountingEnv
from user_env import entry_of
from trial_ray.adapters.processes import EnvProcesses, ProcessEnv, ProcessLimits

async def main():
    processes, entry = EnvProcesses(), entry_of(CountingEnv, {"fault": "step_hangs"})
    envs = [ProcessEnv(entry, (), processes, ProcessLimits(60)) for _ in range(2)]
    for env in envs:
        await env.reset("two", 0)
        await env.step("count")
    hanging = asyncio.create_task(envs[0].step("count"))
    await asyncio.sleep(0.3)
    print(processes._server.pid, flush=True)
    time.sleep(1000)

asyncio.run(main())
"""


def test_all_processes_die_with_their_owner():
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True
    ) as owner:
        server = psutil.Process(int(owner.stdout.readline()))
        forked = server.children()
        owner.kill()
    assert len(forked) == 2
    assert gone(server, *forked)
