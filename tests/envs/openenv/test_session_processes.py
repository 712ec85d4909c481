"""The processes of served sessions, and the command line, without OpenEnv itself."""

from __future__ import annotations

import asyncio
import sys

import gymnasium
import psutil
import pytest

from trial_envs.errors import RemoteEnvError, SessionProcessError
from trial_envs.openenv import processes
from trial_envs.openenv.__main__ import main
from trial_envs.openenv.processes import SessionProcess, SessionProcesses

ENV_ID = "trial/ALFWorld-v0"
GAMES = {"split": "generated", "difficulty": "tiny", "num_games": 64}


@pytest.fixture
def started():
    made = SessionProcesses(ENV_ID, GAMES, 2)
    family = [made._forks._server.pid]
    yield made
    family += children(made) if made._forks._server.poll() is None else []
    made.close()
    assert until_gone(family)


def children(started: SessionProcesses) -> set[int]:
    return {child.pid for child in psutil.Process(started._forks._server.pid).children()}


def playing(started: SessionProcesses) -> tuple[SessionProcess, int]:
    """Return a process with a running episode, and its id."""
    before, process = children(started), started.start()
    asyncio.run(process.ask("reset", 0, None))
    return process, (children(started) - before).pop()


def until_gone(pids: list[int]) -> bool:
    return psutil.wait_procs([each for each in psutil.process_iter() if each.pid in pids], timeout=20)[1] == []


def test_a_process_answers_as_the_environment_does(started):
    env = gymnasium.make(ENV_ID, disable_env_checker=True, **GAMES)
    text, info = env.reset(seed=4)
    process = started.start()

    async def play() -> list[dict]:
        reset = await process.ask("reset", 4, None)
        with pytest.raises(RemoteEnvError, match="UnknownTaskError"):
            await process.ask("reset", None, "unheard of")
        with pytest.raises(RemoteEnvError, match="EpisodeOverError"):
            await process.ask("step", "look")
        named = await process.ask("reset", None, reset["task_id"])
        return [reset, named, *[await process.ask("step", action) for action in env.unwrapped.walkthrough]]

    reset, named, *steps = asyncio.run(play())
    assert reset == named == {"text": text, **info, "reward": None, "done": False, "truncated": False}
    for action, answer in zip(env.unwrapped.walkthrough, steps, strict=True):
        text, reward, terminated, truncated, info = env.step(action)
        assert answer == {"text": text, **info, "reward": reward, "done": terminated, "truncated": truncated}
    assert steps[-1]["won"]
    env.close()


def test_a_hanging_process_is_abandoned_and_counts_for_the_limit(started, monkeypatch):
    process, pid = playing(started)
    started.start()
    monkeypatch.setattr(processes, "STEP_SECONDS", 0.5)
    psutil.Process(pid).suspend()
    with pytest.raises(SessionProcessError, match=r"no answer within 0\.5 s"):
        asyncio.run(process.ask("reset", 0, None))
    with pytest.raises(SessionProcessError, match="2 sessions"):
        started.start()
    started.end(process)
    started.end(process)  # a second call has no effect
    assert until_gone([pid])
    started.start()


def test_processes_die_with_their_program_and_a_new_one_is_started(started):
    process, pid = playing(started)
    psutil.Process(started._forks._server.pid).kill()
    assert until_gone([pid])
    with pytest.raises(SessionProcessError, match="The session's process ended"):
        asyncio.run(process.ask("reset", 0, None))
    started._forks._server.wait(20)
    assert asyncio.run(started.start().ask("reset", 0, None))["done"] is False


def test_without_openenv_the_command_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "openenv", None)
    with pytest.raises(SystemExit, match=r"pip install 'openenv<"):
        main([ENV_ID])
