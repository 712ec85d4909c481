"""Evaluation through a chat endpoint whose answers are those of the test, well-behaved and not."""

import asyncio
import json
import sys
from collections import Counter
from contextlib import nullcontext
from functools import partial

import pytest
from chat_tokenizers import published_tokenizer
from httpx import AsyncClient, ConnectError, MockTransport, RemoteProtocolError, Response
from riddle_env import WORDS, RiddleEnv
from transformers import Qwen3Config
from user_env import registered

from trial_ray import EnvironmentAdapter, GRPOConfig
from trial_ray.adapters.guarded import StepResult
from trial_ray.cli import main
from trial_ray.errors import UserInputError
from trial_ray.evaluation import endpoint as endpoints
from trial_ray.evaluation.comparison import paired_comparison
from trial_ray.evaluation.results import EvaluationResult, protocol_difference
from trial_ray.models.loading import load_tokenizer
from trial_ray.prompts.writer import MessageWriter
from trial_ray.rollout.recording import read_trajectories

KEY = "sk-of-the-test-0123456789"
VARIABLE = "ENDPOINT_TEST_SESAME"  # a name that nothing takes for a secret's
URL = "http://endpoint/v1"


def chat(content, **fields):
    return 200, {"json": {"choices": [{"message": {"role": "assistant", "content": content, **fields}}]}}


class Server:
    """Answers with a script of statuses and contents or errors; without one, or for ``None``, it solves the riddle.

    ``seen`` are the path, the headers and the body of every request for a completion.
    """

    script = ()
    owner = "someone"
    tokenize = None

    def __call__(self, request):
        path = request.url.path
        body = json.loads(request.content or "null")
        if path == "/v1/models":
            return Response(200, json={"data": [{"id": "riddler", "owned_by": self.owner}]})
        if path == "/tokenize":
            tokens = self.tokenize and self.tokenize(body)
            return Response(200 if tokens else 404, json={"tokens": tokens})
        self.seen.append((path, request.headers, body))
        answer = self.script.pop(0) if self.script else None
        if answer is None:
            letter = body["messages"][-1]["content"].split("it begins with ")[1][0]
            answer = chat(next(word for word in WORDS if word.startswith(letter)))
        if isinstance(answer, Exception):
            raise answer
        status, content = answer
        return Response(status, **content)


@pytest.fixture
def server(monkeypatch):
    server = Server()
    server.seen = []
    monkeypatch.setattr("openai.DefaultAsyncHttpxClient", partial(AsyncClient, transport=MockTransport(server)))
    return server


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.json"


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
        options = f"--endpoint {URL} --model riddler --api-key-env {VARIABLE} --env {RiddleEnv.ENV_ID} --split test"
        options += f" --env-adapter {adapter} --tasks 8 --set prompt_style=plain"
        yield lambda *more: main(["evaluate", *options.split(), *map(str, more)])


def evaluated(command, file, *options):
    """Evaluate into a file, which must succeed, and return the result."""
    assert command("--json", file, *options) == 0
    return EvaluationResult.load(file)


def test_model_behind_an_endpoint_is_evaluated_and_compared(command, server, tmp_path, capsys):
    server.script = [(429, {}), (503, {"text": "<html>"}), ConnectError("no route")]
    out = tmp_path / "out"
    good = evaluated(command, out / "good.json", "--max-concurrency", 3)
    assert good.overall.successes == good.overall.episodes == 8
    assert good.labels == {"method": "endpoint", "backbone": "riddler", "seed": None}
    server.script = [chat("purple")] * 24
    bad = evaluated(command, out / "bad.json")
    assert {episode.ended for episode in bad.episodes} == {"turn_limit"}
    assert paired_comparison(bad, good).difference == 1.0
    server.script = [chat("purple")] * 3 * 3  # The three episodes of the first task are lost.
    several = evaluated(command, out / "several.json", "--rollouts", 3, "--max-concurrency", 1)
    assert len(several.episodes) == 24
    assert several.protocol["rollouts"] == 3
    assert several.overall.rate == 7 / 8
    assert [mean for mean, _ in several.pass_at()] == [7 / 8] * 3
    printed = "".join(capsys.readouterr())
    assert KEY not in printed + "".join(path.read_text() for path in out.iterdir())


def test_fields_and_headers_of_requests(command, server, monkeypatch, out):
    """Servers that read neutral values receive them; for others the protocol names what is unknown."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-another-endpoint")
    options = ("--set", "evaluation_temperature=0", "--set", 'chat_template_kwargs={"enable_thinking": true}')
    options += ("--body", json.dumps({"max_tokens": None, "min_p": 0.1}), "--tasks", 1)
    theirs = evaluated(command, out, *options, "--request-timeout", 7).protocol
    path, headers, sent = server.seen[0]
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == f"Bearer {KEY}"
    assert headers["X-Stainless-Read-Timeout"] == "7"
    assert sent.keys() == {"model", "messages", "temperature", "seed", "min_p", "chat_template_kwargs"}
    assert sent["model"] == "riddler"
    assert sent["temperature"] == 0
    out.unlink()
    server.owner = "vllm"
    ours = evaluated(command, out, *options, "--api-key-env", "").protocol
    _, headers, sent = server.seen[-1]
    assert headers["Authorization"] == "Bearer none", "not the key of another endpoint"
    assert sent["top_k"] == -1
    assert sent["min_p"] == 0.1
    assert ours["uncontrolled"] == ["max_new_tokens", "prompt_ids"]
    neutral = {"top_k", "repetition_penalty", "presence_penalty", "frequency_penalty"}
    assert set(theirs["uncontrolled"]) - {*ours["uncontrolled"]} == neutral
    assert protocol_difference(ours, theirs) == ""


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "qwen2_5"])
def test_prompts_are_compared_with_those_of_training(name, server, tmp_path):
    """Published templates, except that of Qwen2.5, drop the reasoning of earlier responses."""
    published_tokenizer(name).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    Qwen3Config(vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    config = GRPOConfig().environment("trial/ALFWorld-v0", env_config={"split": "generated"})
    config.rl_module(model_path=str(tmp_path))

    def tokenize(body):
        text = body.get("prompt") or tokenizer.apply_chat_template(
            body["messages"], tokenize=False, add_generation_prompt=True
        )
        return tokenizer.encode(text, add_special_tokens=False)

    def uncontrolled(style, served):
        server.tokenize = served
        config.env_runners(prompt_style=style)
        endpoint = endpoints.ChatEndpoint(URL, "riddler")
        (entry,) = config.environment_entries()
        return endpoints.connect(endpoint, config, entry).uncontrolled

    assert "prompt_ids" not in uncontrolled("tagged", tokenize)
    with nullcontext() if name == "qwen2_5" else pytest.raises(UserInputError):
        assert "prompt_ids" not in uncontrolled("conversation", tokenize)
    for other in (None, lambda body: [1, 2, 3]):  # a server without the path, and another model's tokenizer
        assert "prompt_ids" in uncontrolled("conversation", other)


def test_episodes_are_recorded_with_their_messages_and_continue(command, server, tmp_path, capsys):
    recorded = tmp_path / "recorded"
    messages = tmp_path / "messages.jsonl"
    result = recorded / "evaluation.json"
    server.script = [(401, {})] * 10
    assert command("--record", recorded, "--set", "history_window=1") == 2  # No episode is played with this setting.
    assert not recorded.exists()
    server.seen = []
    server.script = [
        chat("purple", reasoning_content="It is royal."),
        chat("purple"),
        chat("purple"),
        None,
        (401, {"text": f"expired {KEY}"}),
    ]
    assert command("--record", recorded, "--max-concurrency", 1) == 2
    error = capsys.readouterr().err
    assert KEY not in error
    assert "status 401" in error
    assert command("--record", recorded) == 0
    assert len(server.seen) == 3 + 1 + 1 + 6
    assert command("--model", "another", "--json", result) == 2
    trajectories = read_trajectories(recorded / "trajectories")
    assert sorted(each.task_id for each in trajectories) == sorted(
        each.task_id for each in EvaluationResult.load(result).episodes
    )
    assert json.loads((recorded / "resolved_config.json").read_text())["settings"]["history_window"] == 2
    first = next(each for each in trajectories if len(each.turns) > 1).turns[0]
    assert first.response == "<think>\nIt is royal.\n</think>\n\npurple"
    assert json.loads(first.messages)[-1]["content"] == server.seen[0][2]["messages"][-1]["content"]
    options = f"{recorded} --env-adapter {tmp_path}/adapter.py"
    assert main(f"export {options} --messages {messages}".split()) == 0
    rows = [json.loads(line) for line in messages.read_text().splitlines()]
    assert len(rows) == sum(len(each.turns) for each in trajectories)
    assert sum(row["success"] for row in rows) == 7
    assert KEY not in "".join(path.read_text(errors="replace") for path in recorded.rglob("*") if path.is_file())
    capsys.readouterr()
    assert main(f"inspect {options} --text --show 1".split()) == 0
    assert "user:" in capsys.readouterr().out


@pytest.mark.parametrize(
    "answer",
    [
        (500, {}),
        (200, {"html": "<html><body>Sign in</body></html>"}),
        (200, {"content": b"[" * 100_000, "headers": {"Content-Type": "application/json"}}),
        chat(5),
        RemoteProtocolError("peer closed connection"),
    ],
)
def test_other_answers_fail_only_their_episodes(answer, command, server, out, monkeypatch):
    monkeypatch.setattr(endpoints, "RETRIES", 0)
    server.script = [answer]
    assert command("--json", out, "--max-concurrency", 1) == 1
    assert command("--json", out) == 0
    assert len(server.seen) == 9


def test_prompt_beyond_the_context_ends_the_episode(command, server, out):
    server.script = [(400, {"json": {"error": {"message": "maximum context length is 64 tokens"}}})]
    endings = Counter(each.ended for each in evaluated(command, out).episodes)
    assert endings == {"prompt_limit": 1, "terminated": 7}


def test_redirects_are_not_followed(command, server):
    server.script = [(302, {"headers": {"Location": f"{URL}/elsewhere"}})] * 8
    assert command() == 2
    assert {path for path, _, _ in server.seen} == {"/v1/chat/completions"}


def test_missing_client_is_named_with_its_extra(command, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "openai", None)
    assert command() == 2
    assert "pip install 'openai<" in " ".join(capsys.readouterr().err.split())


def test_conversation_goes_on_and_stop_strings_end_responses():
    sent = []

    class Endpoint:
        async def complete(self, client, messages, fields):
            sent.append(messages)
            return "so</think><action>red</action> and more", "length"  # the prompt ended in <think>

    settings = GRPOConfig().env_runners(prompt_style="conversation", stop_strings=["and", "</action>"])
    template = EnvironmentAdapter("mine/Any-v0").template("conversation")
    player = endpoints.EndpointPlayer(Endpoint(), None, MessageWriter(template, 2), settings, 0)
    for _ in range(2):
        turn = asyncio.run(player.act(StepResult("Look.", "first", "", (), won=False, score=0.0), [], 1))
    assert [len(messages) for messages in sent] == [2, 4]
    assert sent[1][2]["content"] == "<think>\nso</think><action>red</action>"
    assert turn.action == "red"
    assert turn.valid is True
    assert turn.finish_reason == "stop"
