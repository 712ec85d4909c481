"""``trial/OpenEnv-v0``: an environment on a server, which may be slow, broken or stopped."""

import copy
import json
import signal
import threading
import time

import pytest
import seeded_games
from openenv_servers import GAMES, Served, misbehaving, observation

from trial_envs.errors import (
    EpisodeOverError,
    RemoteEnvError,
    ServerAnswerError,
    ServerConnectionError,
    ServerTimeoutError,
)

pytest.importorskip("openenv.core")
TIMEOUT_S = 2.0


def make(url, timeout_s=TIMEOUT_S):
    return seeded_games.make("trial/OpenEnv-v0", {"url": url, "timeout_s": timeout_s}).unwrapped


def answering(*steps):
    """Return a handler that answers a reset, and steps with these messages in turn."""
    answers = iter(steps)

    def answer(connection, message):
        if message["type"] == "reset":
            connection.send(observation(text="start"))
        elif message["type"] == "step":
            step = next(answers)
            step(connection) if callable(step) else connection.send(step)

    return answer


def silence(connection):
    time.sleep(3 * TIMEOUT_S)


def hang_up(connection):
    connection.close_socket()


def test_a_served_environment_answers_as_the_plain_one():
    server = Served("--set=max_turns=20")
    env = make(server.url, timeout_s=30.0)
    here = seeded_games.make("trial/ALFWorld-v0", {**GAMES, "max_turns": 20}).unwrapped
    assert env.tasks("test")[0] == "1000000"
    text_here, info_here = here.reset(seed=7)
    assert env.reset(options={"task": "7"}) == (text_here, info_here | {"task_id": "7"})
    for action in here.walkthrough:
        answer, answer_here = env.step(action), here.step(action)
        assert answer[:4] == answer_here[:4]
        assert answer[4] == answer_here[4] | {"task_id": "7"}
    assert answer[4]["won"]
    named = {"task": info_here["task_id"]}
    assert env.reset(options=named)[1] == here.reset(options=named)[1]
    copied = copy.deepcopy(env)  # in a session of its own
    assert copied.step("look")[0] == env.step("look")[0]
    copied.close()
    assert [env.step("look")[3] for _ in range(19)][-2:] == [False, True]
    with pytest.raises(RemoteEnvError, match="UnknownTaskError"):
        env.reset(options={"task": "unheard of"})
    env.close()
    assert server.stop(signal.SIGTERM) == []


@pytest.mark.parametrize(
    ("step", "error", "cause"),
    [
        (silence, ServerTimeoutError, "no answer within 2 s"),
        (hang_up, ServerConnectionError, "step"),
        ("[" * 100_000, ServerAnswerError, "expected an answer of OpenEnv as JSON"),
        ('{"type": "error", "data": {"message": "broken", "code": "X"}}', RemoteEnvError, "broken"),
        (json.dumps({"data": {"observation": "text"}}), ServerAnswerError, "observation is 'text'"),
        (observation(text="x" * 10_000_000), ServerAnswerError, "expected an answer of at most 4 MB"),
        (observation(reward=float("nan"), text="x"), ServerAnswerError, "reward is nan"),
        (observation(text="x", won="yes"), ServerAnswerError, "won is 'yes'"),
    ],
    ids=range(8),
)
def test_a_fault_of_the_server_ends_one_episode(step, error, cause):
    with misbehaving(answering(step, observation(1.0, True, text="end"))) as url:
        env = make(url)
        env.reset(seed=0)
        with pytest.raises(error, match=cause):
            env.step("look")
        with pytest.raises(EpisodeOverError):
            env.step("look")
        env.reset(seed=0)
        *answer, info = env.step("look")
        assert answer == ["end", 1.0, True, False]
        assert info["won"] is True
        assert info["score"] == 1.0
        assert info["family"] == "openenv"
        assert info["task"] == ""
        env.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "trial-envs-openenv"]
