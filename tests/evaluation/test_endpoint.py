"""Evaluation through a chat endpoint: a server of this process, well-behaved and not."""

from __future__ import annotations

import asyncio
import http.server
import json
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
from riddle_env import WORDS, RiddleEnv
from user_env import registered

from trial_ray.algorithms import GRPOConfig
from trial_ray.cli import main
from trial_ray.environments import EnvironmentAdapter
from trial_ray.environments.guarded import StepResult
from trial_ray.evaluation import endpoint as endpoints
from trial_ray.evaluation.comparison import paired_comparison
from trial_ray.evaluation.results import EvaluationResult

KEY = "sk-of-the-test-0123456789"
VARIABLE = "ENDPOINT_TEST_SESAME"  # a name that nothing takes for a secret's


def chat(text, **choice):
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}, **choice}]}).encode()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.seen.append((self.path, self.headers, body))
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


def hang_up(handler):
    handler.connection.close()


@pytest.mark.parametrize(
    ("url", "more", "words"),
    [
        ("http://user:password@host/v1", "--model m", "--endpoint"),
        ("https://h/v1?key=1", "--model m", "--endpoint"),
        ("http://h/v1", "", "belong together"),
        ("http://h/v1", f"--model m --api-key-env {VARIABLE}", "no such variable"),
    ],
)
def test_what_cannot_be_asked_is_refused_and_not_repeated(url, more, words, capsys):
    arguments = ["--endpoint", url, *more.split(), "--env", "trial/ALFWorld-v0", "--split", "generated"]
    assert main(["evaluate", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert "password@" not in error


@pytest.fixture
def command(server, tmp_path, monkeypatch):
    adapter = tmp_path / "adapter.py"
    adapter.write_text(
        "from riddle_env import Curt\nfrom trial_ray import EnvironmentAdapter\n"
        "ADAPTER = EnvironmentAdapter('mine/Riddle-v0', templates={'plain': Curt()}, max_turns=3, num_seeds=16)\n"
    )
    monkeypatch.setenv(VARIABLE, KEY)
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.001)
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
    server.script = [(429, {}, b"busy"), (503, {}, b"<html>"), (200, {}, hang_up)]
    assert command("--json", str(tmp_path / "out/good.json"), "--max-concurrency", "3") == 0
    good = EvaluationResult.load(tmp_path / "out/good.json")
    assert (good.overall.successes, good.overall.episodes) == (8, 8)
    assert good.labels == {"method": "endpoint", "backbone": "riddler", "seed": None}
    server.script = [(200, {}, chat("purple"))] * 24
    assert command("--json", str(tmp_path / "out/bad.json")) == 0
    bad = EvaluationResult.load(tmp_path / "out/bad.json")
    assert bad.overall.successes == 0
    assert {episode.ended for episode in bad.episodes} == {"turn_limit"}
    assert paired_comparison(bad, good).difference == 1.0
    shown = capsys.readouterr()
    assert KEY not in shown.out + shown.err + files_of(tmp_path / "out")


def test_what_is_sent(command, server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-another-endpoint")
    body = json.dumps({"max_tokens": None, "max_completion_tokens": 8})
    assert (
        command("--body", body, "--set", "evaluation_temperature=0", "--episodes", "1", "--request-timeout", "7") == 0
    )
    path, headers, sent = server.seen[0]
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == f"Bearer {KEY}"
    assert headers["X-Stainless-Read-Timeout"] == "7"
    assert sent.keys() == {"model", "messages", "temperature", "seed", "max_completion_tokens"}
    assert (sent["model"], sent["temperature"], sent["max_completion_tokens"]) == ("riddler", 0, 8)
    assert command("--set", "evaluation_temperature=0.4", "--episodes", "1", "--api-key-env", "") == 0
    _, headers, sent = server.seen[-1]
    assert headers["Authorization"] == "Bearer none", "not the key of another endpoint"
    assert sent["temperature"] == 0.4


def test_an_interrupted_evaluation_continues(command, server, tmp_path, capsys):
    server.script = [(200, {}, None)] * 3 + [(401, {}, f"expired {KEY}".encode())] * 30
    assert command("--json", str(tmp_path / "out.json"), "--max-concurrency", "1") == 2
    assert KEY not in (err := capsys.readouterr().err)
    assert "status 401" in err
    played = (tmp_path / "out.json.partial").read_text().count("task_id")
    assert played == 3
    server.script, server.seen = [], []
    assert command("--json", str(tmp_path / "out.json")) == 0
    assert len(server.seen) == 8 - played
    assert command("--model", "another", "--json", str(tmp_path / "out.json")) == 2


JSON = {"Content-Type": "application/json"}
NO_COMPLETIONS = {
    "down": (500, {}, b"down"),
    "a page": (200, {}, b"<html><body>Sign in</body></html>"),
    "deep": (200, JSON, b"[" * 100_000),
    "no text": (200, JSON, b'{"choices": [{"message": {"content": 5}}]}'),
    "hung up": (200, {}, hang_up),
    "cut": (200, {"Content-Length": "5000", **JSON}, b'{"choices": ['),
}


@pytest.mark.parametrize("kind", NO_COMPLETIONS)
def test_answers_that_are_no_completion_fail_their_episodes_alone(kind, command, server, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(endpoints, "RETRIES", 0)
    server.script = [(200, {}, None)] * 2 + [NO_COMPLETIONS[kind]]
    out = tmp_path / "out.json"
    assert command("--json", str(out), "--max-concurrency", "1") == 1
    assert "1 of the evaluation set's 8 episodes could not be played" in " ".join(capsys.readouterr().err.split())
    assert command("--json", str(out)) == 0
    assert len(server.seen) == 9


def test_a_prompt_beyond_the_context_ends_the_episode(command, server, tmp_path):
    server.script = [(400, {}, b'{"error": {"message": "maximum context length is 64 tokens"}}')]
    assert command("--json", str(tmp_path / "out.json")) == 0
    ended = Counter(episode.ended for episode in EvaluationResult.load(tmp_path / "out.json").episodes)
    assert ended == {"prompt_limit": 1, "terminated": 7}


def test_a_redirect_takes_the_key_nowhere(command, server, capsys):
    server.script = [(302, {"Location": f"{server.url}/elsewhere"}, b"")] * 8
    assert command() == 2
    assert "status 302" in capsys.readouterr().err
    assert {path for path, _, _ in server.seen} == {"/v1/chat/completions"}


def test_without_the_client_the_command_says_how_to_install_it(command, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "openai", None)
    assert command() == 2
    assert "pip install 'openai<" in " ".join(capsys.readouterr().err.split())


def test_a_conversation_sends_all_earlier_messages(command, server):
    server.script = [(200, {}, chat("<action>purple</action>"))] * 3
    thinking = ("--set", 'chat_template_kwargs={"enable_thinking": true}')
    assert command("--set", "prompt_style=conversation", *thinking, "--max-concurrency", "1", "--episodes", "1") == 0
    assert [body["chat_template_kwargs"] for _, _, body in server.seen] == [{"enable_thinking": True}] * 3
    first, second, third = (body["messages"] for _, _, body in server.seen)
    assert [each["role"] for each in third] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert (second[:2], third[:4]) == (first, second)
    assert second[2]["content"] == "<action>purple</action>"


def test_a_conversation_that_starts_again_is_sent_alone_and_responses_end_at_the_stop_string():
    sent = []

    class Endpoint:
        async def complete(self, client, messages, fields):
            sent.append(messages)
            return "<action>red</action> and more", "length"

    settings = GRPOConfig().env_runners(prompt_style="conversation", stop_strings=["and", "</action>"])
    template = EnvironmentAdapter("mine/Any-v0").template("conversation")
    player = endpoints.EndpointPlayer(Endpoint(), None, template, settings, 0)
    for task, past in (("first", 0), ("first", 1), ("second", 0)):
        turn = asyncio.run(player.act(StepResult("Look.", task, "", (), won=False, score=0.0, past_turns=past), [], 1))
    assert [len(messages) for messages in sent] == [2, 4, 2]
    assert "second" in sent[2][0]["content"] + sent[2][1]["content"]
    assert sent[1][2]["content"] == "<action>red</action>"
    assert (turn.action, turn.finish_reason) == ("red", "stop")
