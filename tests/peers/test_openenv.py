"""OpenEnv's client plays these environments on this package's server."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import gymnasium
import psutil
import pytest
import requests
from exported_games import run_example
from openenv_servers import END_SECONDS, GAMES, Served

import trial_envs

pytestmark = pytest.mark.peers

GenericEnvClient = pytest.importorskip("openenv.core").GenericEnvClient
SESSIONS, EPISODES, TURNS = 8, 2, 12
FIELDS = ("task", "task_id", "family", "admissible_actions", "won", "score", "invalid_action")


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    server = Served(f"--max-sessions={SESSIONS}")
    yield server
    assert server.stop(signal.SIGTERM) == []


@pytest.fixture
def connect(served):
    clients = []

    def connect(url: str = served.url):
        clients.append(GenericEnvClient(base_url=url).sync())
        return clients[-1].connect()

    yield connect
    for client in clients:
        client.close()
    assert until(lambda: not served.sessions()), "a session that was closed left its process"


def until(condition, within_s: float = END_SECONDS) -> bool:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def plain() -> gymnasium.Env:
    trial_envs.register()
    return gymnasium.make("trial/ALFWorld-v0", disable_env_checker=True, **GAMES)


def play_both(client, seed: int) -> int:
    """Play the same episodes here and there and compare every answer; returns the number of turns."""
    draw, env, turns = random.Random(seed), plain(), 0
    for episode in range(EPISODES):
        text, info = env.reset(seed=100 * seed + episode)
        result = client.reset(seed=100 * seed + episode)
        reward, ended = None, False
        walkthrough = list(env.unwrapped.walkthrough)
        for turn in range(TURNS):
            assert (result.observation["text"], result.reward, result.done) == (text, reward, ended)
            assert {name: result.observation[name] for name in FIELDS} == info
            if ended:
                break
            # The first episode wins; the second takes random and unknown actions.
            wander = draw.choice([*info["admissible_actions"], "nonsense", ""])
            action = walkthrough[turn] if episode == 0 and turn < len(walkthrough) else wander
            text, reward, terminated, truncated, info = env.step(action)
            ended = terminated or truncated
            result = client.step({"action": action})
            turns += 1
        assert episode or info["won"]
    env.close()
    return turns


def test_parallel_sessions_answer_as_the_plain_environment(served, connect):
    clients = [connect() for _ in range(SESSIONS)]
    with ThreadPoolExecutor(SESSIONS) as pool:
        turns = list(pool.map(play_both, clients, range(SESSIONS)))
    assert min(turns) > TURNS
    assert len(served.sessions()) == SESSIONS
    assert gymnasium.make("trial/OpenEnv-v0", url=served.url).unwrapped.max_instances == SESSIONS
    for wrong, cause in (({"task": "unheard of"}, "UnknownTaskError"), ({"level": 3}, r"reset\(\) got \['level'\]")):
        with pytest.raises(RuntimeError, match=cause):
            clients[0].reset(**wrong)
    clients[0].reset(task=0)
    for wrong in ({"speed": 9}, {"action": "x" * 10_001}):
        with pytest.raises(RuntimeError, match="VALIDATION_ERROR"):
            clients[0].step({"action": "look", **wrong})
    assert not clients[0].step({"action": "look"}).done


def test_idle_sessions_end_and_nothing_is_left_of_a_killed_server():
    server = Served("--max-sessions=4", "--idle-timeout=1")
    with GenericEnvClient(base_url=server.url).sync() as client:
        client.reset(task=0)
        assert until(lambda: not server.sessions())
        with pytest.raises(RuntimeError, match="The session was closed"):
            client.reset(task=0)
    with GenericEnvClient(base_url=server.url).sync() as client:
        client.reset(task=0)
        psutil.Process(*server.sessions()).suspend()
        assert server.stop(signal.SIGKILL) == []


def test_the_example_of_the_page_runs(served, capsys):
    assert "not won 0.0" in run_example("openenv", capsys, served.url)


def test_http_follows_openenvs_standard(served):
    from openenv.cli._validation import validate_running_environment

    def post(path, **body):
        return requests.post(f"{served.url}/{path}", timeout=END_SECONDS, **body)

    report = validate_running_environment(served.url, timeout_s=END_SECONDS)
    assert report["passed"], report
    assert post("reset", json={"seed": 3}).json()["observation"]["text"] == plain().reset(seed=3)[0]
    assert until(lambda: not served.sessions())
    step = post("step", json={"action": {"action": "look"}})
    assert (step.status_code, step.json()["error"]) == (400, "EpisodeOverError")
    for body in ({"json": {"action": {"action": "x" * 10_000_000}}}, {"data": iter([b"x" * 1000])}):
        assert post("step", **body).status_code == 413
