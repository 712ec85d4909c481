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
from chat_tokenizers import published_tokenizer
from riddle_env import WORDS, RiddleEnv
from transformers import Qwen3Config
from user_env import registered

from trial_ray.adapters import EnvironmentAdapter
from trial_ray.adapters.guarded import StepResult
from trial_ray.algorithms import GRPOConfig
from trial_ray.cli import main
from trial_ray.errors import UserInputError
from trial_ray.evaluation import endpoint as endpoints
from trial_ray.evaluation.comparison import paired_comparison
from trial_ray.evaluation.endpoint import connect
from trial_ray.evaluation.results import EvaluationResult, protocol_difference
from trial_ray.models.loading import load_tokenizer

KEY = "sk-of-the-test-0123456789"
VARIABLE = "ENDPOINT_TEST_SESAME"  # a name that nothing takes for a secret's


def chat(text, **choice):
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}, **choice}]}).encode()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        cards = {"data": [{"id": "riddler", "owned_by": self.server.owner}]}
        self.answer(200 if self.path == "/v1/models" else 404, {"Content-Type": "application/json"}, json.dumps(cards))

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            tokens = server.tokenize(body) if server.tokenize else None
            content = json.dumps({"tokens": tokens})
            self.answer(404 if tokens is None else 200, {"Content-Type": "application/json"}, content)
            return
        with server.lock:
            server.seen.append((self.path, self.headers, body))
            status, headers, answer = server.script.pop(0) if server.script else (200, {}, None)
        if callable(answer):
            answer = answer(self)
            if answer is None:
                return
        self.answer(status, headers, chat(solve(body)) if answer is None else answer)

    def answer(self, status, headers, answer):
        answer = answer.encode() if isinstance(answer, str) else answer
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
    server.owner, server.tokenize = "someone", None
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    server.url = f"http://127.0.0.1:{server.server_port}/v1"
    yield server
    server.shutdown()
    server.server_close()
    thread.join(10)


def hang_up(handler):
    handler.connection.close()


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
        options = (
            f"--endpoint {server.url} --model riddler --api-key-env {VARIABLE} --env {RiddleEnv.ENV_ID} --split test"
        )
        options += f" --env-adapter {adapter} --tasks 8 --set prompt_style=plain"
        yield lambda *more: main(["evaluate", *options.split(), *map(str, more)])


def test_model_behind_an_endpoint_is_evaluated_and_compared(command, server, tmp_path, capsys):
    server.script = [(429, {}, b"busy"), (503, {}, b"<html>"), (200, {}, hang_up)]
    out = tmp_path / "out"
    assert command("--json", out / "good.json", "--max-concurrency", 3) == 0
    good = EvaluationResult.load(out / "good.json")
    assert (good.overall.successes, good.overall.episodes) == (8, 8)
    assert good.labels == {"method": "endpoint", "backbone": "riddler", "seed": None}
    server.script = [(200, {}, chat("purple"))] * 24
    assert command("--json", out / "bad.json") == 0
    bad = EvaluationResult.load(out / "bad.json")
    assert bad.overall.successes == 0
    assert {episode.ended for episode in bad.episodes} == {"turn_limit"}
    assert paired_comparison(bad, good).difference == 1.0
    printed = "".join(capsys.readouterr())
    assert KEY not in printed + "".join(path.read_text() for path in out.iterdir())


def test_fields_and_headers_of_requests(command, server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-another-endpoint")
    body = json.dumps({"max_tokens": None, "max_completion_tokens": 8})
    assert command("--body", body, "--set", "evaluation_temperature=0", "--tasks", 1, "--request-timeout", 7) == 0
    path, headers, sent = server.seen[0]
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == f"Bearer {KEY}"
    assert headers["X-Stainless-Read-Timeout"] == "7"
    assert sent.keys() == {"model", "messages", "temperature", "seed", "max_completion_tokens"}
    assert (sent["model"], sent["temperature"], sent["max_completion_tokens"]) == ("riddler", 0, 8)
    assert command("--set", "evaluation_temperature=0.4", "--tasks", 1, "--api-key-env", "") == 0
    _, headers, sent = server.seen[-1]
    assert headers["Authorization"] == "Bearer none", "not the key of another endpoint"
    assert sent["temperature"] == 0.4


def test_neutral_values_replace_the_servers_defaults(command, server, tmp_path):
    """Servers that read the fields receive neutral values; for others the protocol names what is unknown."""
    protocols = []
    for owner in ("vllm", "someone"):
        server.owner, server.seen = owner, []
        result = tmp_path / f"{owner}.json"
        assert command("--tasks", 1, "--json", result, "--body", '{"min_p": 0.1}') == 0
        sent = server.seen[0][2]
        assert ("top_k" in sent, "repetition_penalty" in sent, sent["min_p"]) == (owner == "vllm",) * 2 + (0.1,)
        protocols.append(EvaluationResult.load(result).protocol)
    ours, theirs = (set(protocol["uncontrolled"]) for protocol in protocols)
    assert ours == {"max_new_tokens", "prompt_ids"}
    assert theirs - ours == {"top_k", "repetition_penalty", "presence_penalty", "frequency_penalty"}
    assert protocol_difference(*protocols) == ""


DROPS_REASONING = ("qwen3", "qwen3_5_think", "deepseek_r1_distill", "deepseekv3", "glm4moe")


def served_template(name: str, folder: Path, style: str):
    """Return the config of a run whose tokenizer has a published chat template, and the tokenizer."""
    tokenizer = published_tokenizer(name)
    tokenizer.save_pretrained(folder)
    Qwen3Config(vocab_size=len(tokenizer)).save_pretrained(folder)
    config = GRPOConfig().environment("trial/ALFWorld-v0", env_config={"split": "generated"})
    return config.rl_module(model_path=str(folder)).env_runners(prompt_style=style), load_tokenizer(str(folder))


def tokenizing(tokenizer):
    def tokenize(body):
        if "prompt" in body:
            return tokenizer(body["prompt"], add_special_tokens=body["add_special_tokens"])["input_ids"]
        text = tokenizer.apply_chat_template(body["messages"], tokenize=False, add_generation_prompt=True)
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    return tokenize


@pytest.mark.parametrize("name", [*DROPS_REASONING, "qwen2_5"])
def test_conversations_are_compared_with_those_of_training(name, server, tmp_path):
    config, tokenizer = served_template(name, tmp_path, "conversation")
    server.tokenize = tokenizing(tokenizer)
    (entry,) = config.environment_entries()
    endpoint = endpoints.ChatEndpoint(server.url, "riddler")
    if name in DROPS_REASONING:
        with pytest.raises(UserInputError):
            connect(endpoint, config, entry)
    else:
        assert "prompt_ids" not in connect(endpoint, config, entry).uncontrolled
    single = config.copy(copy_frozen=False).env_runners(prompt_style="tagged")
    assert "prompt_ids" not in connect(endpoint, single, entry).uncontrolled


def test_uncompared_prompts_are_recorded(server, tmp_path):
    config, _ = served_template("qwen3", tmp_path, "conversation")
    (entry,) = config.environment_entries()
    for tokenize in (None, lambda body: [1, 2, 3]):  # a server without the path, and another model's tokenizer
        server.tokenize = tokenize
        assert "prompt_ids" in connect(endpoints.ChatEndpoint(server.url, "riddler"), config, entry).uncontrolled


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.json"


def test_interrupted_evaluation_continues(command, server, out, capsys):
    server.script = [(200, {}, None)] * 3 + [(401, {}, f"expired {KEY}".encode())] * 30
    assert command("--json", out, "--max-concurrency", 1) == 2
    error = capsys.readouterr().err
    assert KEY not in error
    assert "status 401" in error
    assert out.with_name("out.json.partial").read_text().count("task_id") == 3
    server.script, server.seen = [], []
    assert command("--json", out) == 0
    assert len(server.seen) == 5
    assert command("--model", "another", "--json", out) == 2


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
def test_other_answers_fail_only_their_episodes(kind, command, server, out, monkeypatch):
    monkeypatch.setattr(endpoints, "RETRIES", 0)
    server.script = [(200, {}, None)] * 2 + [NO_COMPLETIONS[kind]]
    assert command("--json", out, "--max-concurrency", 1) == 1
    assert command("--json", out) == 0
    assert len(server.seen) == 9


def test_prompt_beyond_the_context_ends_the_episode(command, server, out):
    server.script = [(400, {}, b'{"error": {"message": "maximum context length is 64 tokens"}}')]
    assert command("--json", out) == 0
    ended = Counter(episode.ended for episode in EvaluationResult.load(out).episodes)
    assert ended == {"prompt_limit": 1, "terminated": 7}


def test_redirects_are_not_followed(command, server):
    server.script = [(302, {"Location": f"{server.url}/elsewhere"}, b"")] * 8
    assert command() == 2
    assert {path for path, _, _ in server.seen} == {"/v1/chat/completions"}


def test_missing_client_is_named_with_its_extra(command, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "openai", None)
    assert command() == 2
    assert "pip install 'openai<" in " ".join(capsys.readouterr().err.split())


def test_conversation_sends_all_earlier_messages(command, server):
    server.script = [(200, {}, chat("<action>purple</action>"))] * 3
    thinking = ("--set", 'chat_template_kwargs={"enable_thinking": true}')
    assert command("--set", "prompt_style=conversation", *thinking, "--max-concurrency", 1, "--tasks", 1) == 0
    assert [body["chat_template_kwargs"] for _, _, body in server.seen] == [{"enable_thinking": True}] * 3
    first, second, third = (body["messages"] for _, _, body in server.seen)
    assert [message["role"] for message in third] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert (second[:2], third[:4]) == (first, second)
    assert second[2]["content"] == "<action>purple</action>"


def test_conversation_restarts_and_stop_strings_end_responses():
    sent = []

    class Endpoint:
        async def complete(self, client, messages, fields):
            sent.append(messages)
            return "so</think><action>red</action> and more", "length"  # the prompt ended in <think>

    settings = GRPOConfig().env_runners(prompt_style="conversation", stop_strings=["and", "</action>"])
    template = EnvironmentAdapter("mine/Any-v0").template("conversation")
    player = endpoints.EndpointPlayer(Endpoint(), None, template, settings, 0)
    for task, past in (("first", 0), ("first", 1), ("second", 0)):
        turn = asyncio.run(player.act(StepResult("Look.", task, "", (), won=False, score=0.0, past_turns=past), [], 1))
    assert [len(messages) for messages in sent] == [2, 4, 2]
    assert "second" in sent[2][0]["content"] + sent[2][1]["content"]
    assert sent[1][2]["content"] == "<think>\nso</think><action>red</action>"
    assert (turn.action, turn.valid, turn.finish_reason) == ("red", True, "stop")
