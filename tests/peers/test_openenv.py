"""OpenEnv's client plays these environments on this package's server."""

import random
import signal
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import requests
from commands import wait_until
from exported_games import run_example
from openenv_servers import END_SECONDS, GAMES, Served
from seeded_games import make

GenericEnvClient = pytest.importorskip("openenv.core").GenericEnvClient
SESSIONS, EPISODES, TURNS = 8, 2, 12
FIELDS = ("task", "task_id", "family", "admissible_actions", "won", "score", "invalid_action")


@pytest.fixture(scope="module")
def served():
    server = Served(f"--max-sessions={SESSIONS}")
    yield server
    assert server.stop(signal.SIGTERM) == []


@pytest.fixture
def connect(served):
    clients = []

    def connect():
        clients.append(GenericEnvClient(base_url=served.url).sync())
        return clients[-1].connect()

    yield connect
    for client in clients:
        client.close()
    wait_for_end_of_sessions(served)


def wait_for_end_of_sessions(server):
    """Require that no session's process is left after a while."""
    wait_until(lambda: not server.sessions(), within_s=END_SECONDS)


def plain():
    return make("trial/ALFWorld-v0", GAMES)


def play_both(client, seed):
    """Play the same episodes here and there and compare every answer; returns the number of turns."""
    draw, env, turns = random.Random(seed), plain(), 0
    for episode in range(EPISODES):
        text, info = env.reset(seed=100 * seed + episode)
        result = client.reset(seed=100 * seed + episode)
        reward, ended = None, False
        walkthrough = list(env.unwrapped.walkthrough)
        for turn in range(TURNS):
            assert result.observation["text"] == text
            assert result.reward == reward
            assert result.done == ended
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
    assert make("trial/OpenEnv-v0", {"url": served.url}).unwrapped.max_instances == SESSIONS
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
        wait_for_end_of_sessions(server)
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
    wait_for_end_of_sessions(served)
    step = post("step", json={"action": {"action": "look"}})
    assert step.status_code == 400
    assert step.json()["error"] == "EpisodeOverError"
    for body in ({"json": {"action": {"action": "x" * 10_000_000}}}, {"data": iter([b"x" * 1000])}):
        assert post("step", **body).status_code == 413
