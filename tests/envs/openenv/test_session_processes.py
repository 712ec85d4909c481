"""The processes of served sessions, and the command line, without OpenEnv itself."""

import asyncio

import psutil
import pytest
from openenv_servers import GAMES

from trial_envs.alfworld.env import ALFWorldEnv
from trial_envs.errors import RemoteEnvError, SessionProcessError
from trial_envs.openenv import processes
from trial_envs.openenv.processes import SessionProcesses


@pytest.fixture
def started():
    made = SessionProcesses("trial/ALFWorld-v0", GAMES, 2)
    yield made
    server = psutil.Process(made._forks._server.pid)
    children = server.children()
    made.close()
    assert gone(server, *children)


def begin(session):
    asyncio.run(session.ask("reset", 0, None))


def playing(started):
    """Return a session with a running episode, and its process."""
    server = psutil.Process(started._forks._server.pid)
    before, session = server.children(), started.start()
    begin(session)
    (process,) = {*server.children()} - {*before}
    return session, process


def gone(*ended):
    return psutil.wait_procs(ended, timeout=20)[1] == []


def test_a_process_answers_as_the_environment_does(started):
    env = ALFWorldEnv(**GAMES)
    text, info = env.reset(seed=4)
    expected = [{"text": text, **info, "reward": None, "done": False, "truncated": False}] * 2
    for action in env.walkthrough:
        text, reward, done, truncated, told = env.step(action)
        expected.append({"text": text, **told, "reward": reward, "done": done, "truncated": truncated})
    process = started.start()

    async def play():
        reset = await process.ask("reset", 4, None)
        for request, cause in ((("reset", None, "unheard of"), "UnknownTask"), (("step", "look"), "EpisodeOver")):
            with pytest.raises(RemoteEnvError, match=f"{cause}Error"):
                await process.ask(*request)
        named = await process.ask("reset", None, info["task_id"])
        return [reset, named, *[await process.ask("step", action) for action in env.walkthrough]]

    assert asyncio.run(play()) == expected


def test_a_process_that_hangs_or_died_counts_for_the_limit(started, monkeypatch):
    (hanging, first), (dead, second) = playing(started), playing(started)
    second.kill()
    with pytest.raises(SessionProcessError, match="The session's process ended"):
        begin(dead)
    monkeypatch.setattr(processes, "STEP_SECONDS", 0.5)
    first.suspend()
    with pytest.raises(SessionProcessError, match=r"no answer within 0\.5 s"):
        begin(hanging)
    with pytest.raises(SessionProcessError, match="2 sessions"):
        started.start()
    for _ in range(2):  # a second call has no effect
        started.end(hanging)
    assert gone(first)
    started.start()
