"""Evaluation through a chat endpoint: a server of this process, well-behaved and not."""

from __future__ import annotations

import http.server
import itertools
import json
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from riddle_env import WORDS, RiddleEnv
from user_env import registered

from trial_ray.cli import main
from trial_ray.errors import EngineError, PromptTooLongError, UserInputError
from trial_ray.evaluation import endpoint as endpoints
from trial_ray.evaluation.comparison import paired_comparison
from trial_ray.evaluation.endpoint import ChatEndpoint
from trial_ray.evaluation.results import EvaluationResult

KEY = "sk-of-the-test-0123456789"
VARIABLE = "ENDPOINT_TEST_SESAME"  # a name that nothing takes for a secret's
SAMPLING = {"temperature": 0.0, "max_tokens": 8}


def chat(text, **choice):
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}, **choice}]}).encode()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.seen.append((self.path, dict(self.headers), body))
            status, headers, answer = server.script.pop(0) if server.script else (200, {}, None)
        if callable(answer):
            answer = answer(self)
            if answer is None:
                return
        answer = chat(solve(body)) if answer is None else answer
        self.send_response(status)
        for name, value in {"Content-Length": str(len(answer)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


def solve(body):
    text = body["messages"][-1]["content"]
    letter = text.split("it begins with ")[1][0]
    return next(word for word in WORDS if word.startswith(letter))


@pytest.fixture
def server():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.script, server.seen, server.lock = [], [], threading.Lock()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    server.url = f"http://127.0.0.1:{server.server_port}/v1"
    yield server
    server.shutdown()
    server.server_close()
    thread.join(10)


@pytest.fixture
def client(server, monkeypatch):
    monkeypatch.setenv(VARIABLE, KEY)
    pauses = []

    def pause(seconds):
        pauses.append(seconds)
        object.__setattr__(made, "timeout_s", 60.0)  # for the right answer, however busy this machine is

    made = ChatEndpoint(server.url, "riddler", VARIABLE, timeout_s=1.0, sleep=pause)
    return made, pauses


def ask(client):
    return client.answer([{"role": "user", "content": "it begins with r"}], SAMPLING)


def drip(handler):
    """Every byte comes within the socket's timeout, the answer never."""
    handler.send_response(200)
    handler.end_headers()
    for _ in range(30):
        try:
            handler.wfile.write(b" ")
            handler.wfile.flush()
        except OSError:
            return
        time.sleep(0.1)


def stall(handler):
    time.sleep(2.0)


def hang_up(handler):
    handler.connection.close()


BROKEN = {
    "busy": (429, {"Retry-After": "7"}, b'{"error": {"message": "slow down"}}'),
    "overloaded": (503, {}, b"<html>unavailable</html>"),
    "a page": (200, {}, b"<html><body>Sign in</body></html>"),
    "no completion": (200, {}, b'{"choices": []}'),
    "a list": (200, {}, b"[1, 2]"),
    "nothing": (200, {}, b""),
    "deep": (200, {}, b"[" * 100_000),
    "no text": (200, {}, b'{"choices": [{"message": {"content": 5}}]}'),
    "slow": (200, {}, stall),
    "dripping": (200, {}, drip),
    "hung up": (200, {}, hang_up),
    "cut": (200, {"Content-Length": "5000"}, b'{"choices": ['),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_answer_is_asked_for_again(kind, server, client):
    made, pauses = client
    server.script = [BROKEN[kind]]
    assert ask(made).text == "red"
    assert len(server.seen) == 2
    assert len(pauses) == 1
    assert pauses == [7.0] if kind == "busy" else 0 < pauses[0] <= endpoints.FIRST_PAUSE_S


def test_pauses_grow_and_the_last_error_is_told(server, client):
    made, pauses = client
    server.script = [(500, {}, b"out of order")] * endpoints.ATTEMPTS
    with pytest.raises(EngineError, match=r"no answer in 6 attempts; the last: status 500: out of order"):
        ask(made)
    assert len(server.seen) == endpoints.ATTEMPTS
    assert all(later > earlier / 2 for earlier, later in itertools.pairwise(pauses))
    assert max(pauses) <= endpoints.LONGEST_PAUSE_S


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
def test_a_refusal_ends_at_once_without_the_key(status, server, client):
    made, pauses = client
    server.script = [(status, {}, f"the key {KEY} is wrong".encode())]
    with pytest.raises(UserInputError, match=rf"status {status}: the key <hidden> is wrong") as raised:
        ask(made)
    assert KEY not in str(raised.value)
    assert (len(server.seen), pauses) == (1, [])


def test_a_prompt_beyond_the_context_ends_the_episode(server, client):
    server.script = [(400, {}, b'{"error": {"message": "maximum context length is 64 tokens"}}')]
    with pytest.raises(PromptTooLongError):
        ask(client[0])


def test_a_redirect_takes_the_key_nowhere(server, client):
    server.script = [(302, {"Location": f"{server.url}/elsewhere"}, b"")]
    with pytest.raises(UserInputError, match="status 302"):
        ask(client[0])
    assert [path for path, _, _ in server.seen] == ["/v1/chat/completions"]


def test_what_is_sent(server, monkeypatch):
    monkeypatch.setenv(VARIABLE, KEY)
    body = {"max_tokens": None, "max_completion_tokens": 8}
    made = ChatEndpoint(f"{server.url}/", "riddler", VARIABLE, body=body)
    ask(made)
    ((path, headers, sent),) = server.seen
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == f"Bearer {KEY}"
    assert sent == {
        "model": "riddler",
        "messages": [{"role": "user", "content": "it begins with r"}],
        "temperature": 0.0,
        "max_completion_tokens": 8,
    }
    assert KEY not in repr(made)


@pytest.mark.parametrize(
    "url", ["ftp://host/v1", "host:8000", "http://user:password@host/v1", "https://h/v1?key=1", ""]
)
def test_a_url_of_another_kind_is_refused_and_not_repeated(url):
    with pytest.raises(UserInputError, match="--endpoint") as raised:
        ChatEndpoint(url, "riddler")
    assert "password@" not in str(raised.value)


def test_a_variable_that_is_not_set_is_refused(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(UserInputError, match=f"{VARIABLE}: the environment has no such variable"):
        ChatEndpoint("http://127.0.0.1:1/v1", "riddler", VARIABLE)


# --- the command


@pytest.fixture
def adapter(tmp_path):
    path = tmp_path / "adapter.py"
    path.write_text(
        "from riddle_env import Curt\nfrom trial_ray import EnvironmentAdapter\n"
        "ADAPTER = EnvironmentAdapter('mine/Riddle-v0', templates={'plain': Curt()}, max_turns=3, num_seeds=16)\n"
    )
    return path


@pytest.fixture
def command(server, adapter, monkeypatch):
    monkeypatch.setenv(VARIABLE, KEY)
    monkeypatch.setattr(endpoints, "FIRST_PAUSE_S", 0.01)
    with registered(RiddleEnv):
        yield lambda *more: main(
            [
                *("evaluate", "--endpoint", server.url, "--model", "riddler", "--api-key-env", VARIABLE),
                *("--env", RiddleEnv.ENV_ID, "--split", "test", "--env-adapter", str(adapter), "--episodes", "8"),
                *("--set", "prompt_style=plain", *more),
            ]
        )


def files_of(folder: Path) -> str:
    return "".join(path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file())


def test_a_model_behind_an_endpoint_is_evaluated_and_compared(command, server, tmp_path, capsys):
    server.script = [(429, {}, b"busy"), (200, {}, b"<html>")]
    assert command("--json", str(tmp_path / "out/good.json"), "--games", "3") == 0
    good = EvaluationResult.load(tmp_path / "out/good.json")
    assert (good.overall.successes, good.overall.episodes) == (8, 8)
    assert not any("chat_template_kwargs" in body for _, _, body in server.seen)
    assert good.labels == {"method": "endpoint", "backbone": "riddler", "seed": None}
    server.script = [(200, {}, chat("purple"))] * 24
    assert command("--json", str(tmp_path / "out/bad.json")) == 0
    bad = EvaluationResult.load(tmp_path / "out/bad.json")
    assert bad.overall.successes == 0
    assert {episode.ended for episode in bad.episodes} == {"turn_limit"}
    assert paired_comparison(bad, good).difference == 1.0
    shown = capsys.readouterr()
    assert KEY not in shown.out + shown.err + files_of(tmp_path / "out")


def test_an_interrupted_evaluation_continues(command, server, tmp_path, capsys):
    server.script = [(200, {}, None)] * 3 + [(401, {}, f"expired {KEY}".encode())] * 30
    assert command("--json", str(tmp_path / "out.json"), "--games", "1") == 2
    assert KEY not in (err := capsys.readouterr().err)
    assert "status 401" in err
    played = (tmp_path / "out.json.partial").read_text().count("task_id")
    assert played == 3
    server.script, server.seen = [], []
    assert command("--json", str(tmp_path / "out.json")) == 0
    assert len(server.seen) == 8 - played
    assert command("--model", "another", "--json", str(tmp_path / "out.json")) == 2


def test_an_endpoint_that_is_down_fails_and_says_so(command, server, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(endpoints, "ATTEMPTS", 1)
    server.script = [(500, {}, b"down")] * 1000
    assert command("--set", "max_group_redraws=1") == 1
    assert "8 of the evaluation set's 8 episodes could not be played" in " ".join(capsys.readouterr().err.split())
    assert len(server.seen) == 16


def test_several_games_are_played_at_once(command, server):
    running, most, lock, all_here = Counter(), [0], threading.Lock(), threading.Event()

    def slowly(handler):
        with lock:
            running["now"] += 1
            most[0] = max(most[0], running["now"])
            if most[0] == 4:
                all_here.set()
        assert all_here.wait(60)
        with lock:
            running["now"] -= 1
        return chat("red")

    server.script = [(200, {}, slowly)] * 200
    assert command("--games", "4") == 0
    assert most[0] == 4


def test_a_conversation_sends_all_earlier_messages(command, server):
    server.script = [(200, {}, chat("<action>purple</action>"))] * 3
    thinking = ("--set", 'chat_template_kwargs={"enable_thinking": true}')
    assert command("--set", "prompt_style=conversation", *thinking, "--games", "1", "--episodes", "1") == 0
    assert [body["chat_template_kwargs"] for _, _, body in server.seen] == [{"enable_thinking": True}] * 3
    first, second, third = (body["messages"] for _, _, body in server.seen)
    assert [each["role"] for each in third] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert (second[:2], third[:4]) == (first, second)
    assert second[2]["content"] == "<action>purple</action>"


def test_endpoint_and_model_belong_together(tmp_path, capsys):
    assert main(["evaluate", "--endpoint", "http://h/v1", "--env", "trial/ALFWorld-v0", "--split", "generated"]) == 2
    assert "belong together" in capsys.readouterr().err
