"""The processes of served sessions, and the command line, without OpenEnv itself."""

from __future__ import annotations

import asyncio

import gymnasium
import psutil
import pytest

from trial_envs.errors import RemoteEnvError, SessionProcessError
from trial_envs.openenv import processes
from trial_envs.openenv.processes import SessionProcess, SessionProcesses

ENV_ID = "trial/ALFWorld-v0"
GAMES = {"split": "generated", "difficulty": "tiny", "num_games": 64}


@pytest.fixture
def started():
    made = SessionProcesses(ENV_ID, GAMES, 2)
    yield made
    family = [made._forks._server.pid, *children(made)]
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
    expected = [{"text": text, **info, "reward": None, "done": False, "truncated": False}] * 2
    for action in env.unwrapped.walkthrough:
        text, reward, done, truncated, told = env.step(action)
        expected.append({"text": text, **told, "reward": reward, "done": done, "truncated": truncated})
    process = started.start()

    async def play() -> list[dict]:
        reset = await process.ask("reset", 4, None)
        for request, cause in ((("reset", None, "unheard of"), "UnknownTask"), (("step", "look"), "EpisodeOver")):
            with pytest.raises(RemoteEnvError, match=f"{cause}Error"):
                await process.ask(*request)
        named = await process.ask("reset", None, info["task_id"])
        return [reset, named, *[await process.ask("step", action) for action in env.unwrapped.walkthrough]]

    assert asyncio.run(play()) == expected
    assert expected[-1]["won"]
    env.close()


def test_a_process_that_hangs_or_died_counts_for_the_limit(started, monkeypatch):
    (hanging, first), (dead, second) = playing(started), playing(started)
    psutil.Process(second).kill()
    with pytest.raises(SessionProcessError, match="The session's process ended"):
        asyncio.run(dead.ask("reset", 0, None))
    monkeypatch.setattr(processes, "STEP_SECONDS", 0.5)
    psutil.Process(first).suspend()
    with pytest.raises(SessionProcessError, match=r"no answer within 0\.5 s"):
        asyncio.run(hanging.ask("reset", 0, None))
    with pytest.raises(SessionProcessError, match="2 sessions"):
        started.start()
    for _ in range(2):  # a second call has no effect
        started.end(hanging)
    assert until_gone([first])
    started.start()
