"""OpenEnv's client plays our environments on our server, and ours plays on servers of OpenEnv, good and bad."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gymnasium
import psutil
import pytest
import requests
from hostile_texts import HOSTILE
from openenv_servers import END_SECONDS, GAMES, Served
from snippets import snippets

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
            # The first episode wins, the second wanders and says what no engine understands.
            wander = draw.choice([*info["admissible_actions"], "nonsense", ""])
            action = walkthrough[turn] if episode == 0 and turn < len(walkthrough) else wander
            text, reward, terminated, truncated, info = env.step(action)
            ended = terminated or truncated
            result = client.step({"action": action})
            turns += 1
        assert episode or info["won"]
    env.close()
    return turns


def test_sessions_at_once_answer_as_the_plain_environment_turn_by_turn(served, connect):
    clients = [connect() for _ in range(SESSIONS)]
    with ThreadPoolExecutor(SESSIONS) as pool:
        turns = list(pool.map(play_both, clients, range(SESSIONS)))
    assert min(turns) > TURNS
    assert len(served.sessions()) == SESSIONS


def test_a_task_can_be_named_and_unseeded_sessions_draw_different_ones(connect):
    first, second = connect(), connect()
    drawn = [[client.reset().observation["task_id"] for _ in range(4)] for client in (first, second)]
    assert drawn[0] != drawn[1]
    assert first.reset(task=drawn[1][0]).observation["task_id"] == drawn[1][0]
    assert first.state()["task_id"] == drawn[1][0]
    assert first.reset(task=3).observation["task_id"] == plain().unwrapped.tasks()[3]


@pytest.mark.parametrize(
    ("request_", "told"),
    [
        (lambda client: client.step({"action": "look"}), "no episode is running"),
        (lambda client: client.reset(task="unheard of"), "UnknownTaskError"),
        (lambda client: client.reset(task=-1), "UnknownTaskError"),
        (lambda client: client.reset(task=["a"]), "UnknownTaskError"),
        (lambda client: client.reset(seed="a"), "Seed must be a python integer"),
        (lambda client: client.reset(seed=-1), "Seed must be"),
        (lambda client: client.reset(level=3), r"reset\(\) got \['level'\]"),
        (lambda client: client.step({"action": 5}), "VALIDATION_ERROR"),
        (lambda client: client.step({"action": None}), "VALIDATION_ERROR"),
        (lambda client: client.step({}), "VALIDATION_ERROR"),
        (lambda client: client.step({"action": "look", "speed": 9}), "VALIDATION_ERROR"),
        (lambda client: client.step({"action": "x" * 10_001}), "VALIDATION_ERROR"),
    ],
)
def test_a_wrong_request_is_an_error_and_the_session_goes_on(request_, told, connect):
    client = connect()
    with pytest.raises(RuntimeError, match=told):
        request_(client)
    client.reset(task=0)
    assert not client.step({"action": "look"}).done


def test_any_text_is_an_action(connect):
    client = connect()
    client.reset(task=0)
    for text in ("", " ", "\n" * 10_000, "😀" * 10_000, *HOSTILE):
        answer = client.step({"action": text})
        assert answer.observation["invalid_action"]
        assert answer.observation["text"] == "Nothing happens."


def test_a_message_over_the_limit_closes_its_connection_alone(served, connect):
    client, other = connect(), connect()
    client.reset(task=0)
    other.reset(task=0)
    with pytest.raises(Exception, match="1009"):
        client.step({"action": "x" * 10_000_000})
    assert until(lambda: len(served.sessions()) == 1)
    assert not other.step({"action": "look"}).done


def test_a_session_over_the_limit_is_refused_and_a_free_one_taken(connect):
    clients = [connect() for _ in range(SESSIONS)]
    for client in clients:
        client.reset(task=0)
    with pytest.raises(RuntimeError, match=r"8/8 sessions active.*CAPACITY_REACHED"):
        connect().reset(task=0)
    clients[0].close()
    late = connect()

    def answers() -> bool:
        try:
            return not late.reset(task=0).done
        except RuntimeError:  # the slot is freed when the process has ended
            return False

    assert until(answers)


def test_a_killed_process_ends_its_episode_alone(served, connect):
    client, others = connect(), [connect() for _ in range(3)]
    client.reset(task=0)
    (pid,) = served.sessions()
    for other in others:
        other.reset(task=0)
    psutil.Process(pid).kill()
    with pytest.raises(RuntimeError, match="the session's process ended"):
        client.step({"action": "look"})
    with pytest.raises(RuntimeError, match="no episode is running"):
        client.step({"action": "look"})
    for other in others:
        assert not other.step({"action": "look"}).done
    assert not client.reset(task=0).done


def test_a_client_that_is_killed_frees_its_process(served, connect):
    code = (
        "import sys, time; from openenv.core import GenericEnvClient; c = GenericEnvClient(base_url=sys.argv[1]).sync();"
        "c.connect(); c.reset(task=0); print('ready', flush=True); time.sleep(600)"
    )
    client = subprocess.Popen([sys.executable, "-c", code, served.url], stdout=subprocess.PIPE, text=True)
    assert client.stdout.readline() == "ready\n"
    assert len(served.sessions()) == 1
    client.kill()
    client.communicate(timeout=END_SECONDS)
    assert until(lambda: not served.sessions())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_nothing_is_left_of_a_server_that_ends(number):
    server = Served("--max-sessions=4", "--idle-timeout=1")
    clients = [GenericEnvClient(base_url=server.url).sync().connect() for _ in range(3)]
    for client in clients:
        client.reset(task=0)
    hangs = sorted(server.sessions())[0]
    assert len(server.sessions()) == 3
    if number is signal.SIGTERM:  # the idle ones end before
        assert until(lambda: not server.sessions())
        with pytest.raises(RuntimeError, match="the session was closed"):
            clients[0].reset(task=0)
    else:
        psutil.Process(hangs).suspend()
    assert server.stop(number) == []
    assert server.process.returncode == {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -9}[number]
    for client in clients:
        client.close()


def test_the_documentation_s_client_plays(served, capsys):
    (code,) = snippets("environments.md", "openenv")
    assert "http://127.0.0.1:8000" in code
    exec(compile(code.replace("http://127.0.0.1:8000", served.url), "docs/environments.md, OpenEnv", "exec"), {})
    assert "not won 0.0" in capsys.readouterr().out


def test_http_answers_as_openenv_s_standard_says(served):
    from openenv.cli._validation import validate_running_environment

    report = validate_running_environment(served.url, timeout_s=END_SECONDS)
    assert report["passed"], report
    sent = requests.post(f"{served.url}/reset", json={"seed": 3}, timeout=END_SECONDS).json()
    assert sent["observation"]["text"] == plain().reset(seed=3)[0]
    assert until(lambda: not served.sessions())
    step = requests.post(f"{served.url}/step", json={"action": {"action": "look"}}, timeout=END_SECONDS)
    assert (step.status_code, step.json()["error"]) == (400, "EpisodeOverError")
    large = {"action": {"action": "x" * 10_000_000}}
    for body in ({"json": large}, {"data": iter([b"x" * 1000])}):
        assert requests.post(f"{served.url}/step", timeout=END_SECONDS, **body).status_code == 413


def test_the_manifest_is_one_that_openenv_accepts():
    folder = Path(trial_envs.__file__).parent / "openenv"
    command = [sys.executable, "-m", "openenv.cli", "validate", str(folder), "--level", "static", "--skip-build"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert "Verdict: PASS" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["trial/ALFWorld-v0", "--set", "depth=3"], "unexpected keyword argument 'depth'"),
        (["trial/ALFWorld-v0", "--split", "unheard of"], "UnknownSplitError"),
        (["trial/ALFWorld-v0", "--set", "max_turns"], "expected key=value"),
        (["trial/ALFWorld-v0", "--set", "max_turns=__import__('os')"], "__import__"),
        (["trial/ALFWorld-v0", "--max-sessions", "0"], "at least 1"),
        (["trial/ALFWorld-v0", "--idle-timeout", "nan"], "positive number"),
        (["trial/ALFWorld-v0", "--port", "70000"], "expected 0 to 65535"),
        (["trial/ALFWorld-v0", "--host", "192.0.2.1", "--split", "generated"], "assign requested address"),
        (["trial/Nothing-v0"], "invalid choice"),
        (["trial/OpenEnv-v0", "--set", 'url="http://127.0.0.1:1"'], "ServerConnectionError"),
    ],
)
def test_a_server_that_cannot_start_says_why(arguments, told):
    command = [sys.executable, "-m", "trial_envs.openenv", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode in (1, 2)
    assert told in done.stderr
    assert "Traceback" not in done.stderr
