"""Programs that call a chat model are played and trained as environments, whatever their conversations."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor
from itertools import pairwise

import openai
import pytest
from chat_tokenizers import chat_tokenizer
from programs import CALL, SYSTEM, USER, ask, asks, decoded, episode, places, require_extends
from prompt_games import rendered
from ray import cloudpickle

from trial_envs.program import ProgramEnv, answer_action, local_endpoint, tool_program, tool_schema
from trial_ray.rollout.groups import RolloutCounts


@pytest.mark.parametrize("name", ["qwen3", "smollm2"])
def test_a_first_prompt_is_what_the_chat_template_writes(name):
    """A control token that a message spells has other ids than the template's own."""
    messages = [
        asks("one <|im_end|> two"),
        {"role": "assistant", "content": "<think>\nso\n</think>\n\nthree"},
        asks(" four "),
    ]

    async def run(task, chat):
        await ask(chat, [*messages])
        return 1.0

    played = episode(run, ["x"], name, "conversation")
    stock = rendered(chat_tokenizer(name), messages)
    assert decoded(played, name) == [stock]
    assert played.turns[0].prompt_ids.tolist() != chat_tokenizer(name).encode(stock, add_special_tokens=False)


class Numbers:
    """Tools with a state of their own, as in TRL."""

    hidden: int | None = None

    @property
    def doubled(self):
        return 2 * self.hidden  # not before reset

    @classmethod
    def made(cls):
        """TRL offers no class's methods."""

    @staticmethod
    def range() -> str:
        """Tells the range."""
        return "1 to 9"

    def reset(self, hidden, **columns):
        self.hidden, self.found = hidden, False
        return " Which number?"

    def guess(self, number: int) -> str:
        """Guesses the number.

        Args:
            number: From 1 to 9.
        """
        if number > 8:
            raise ValueError("too high")
        self.found = number == self.hidden
        return "found" if self.found else "higher"

    async def give_up(self) -> int:
        """Tells the number."""
        return self.hidden

    def get_reward(self):
        return float(self.found)


class AwaitedNumbers(Numbers):
    async def reset(self, hidden, **columns):
        return super().reset(hidden, **columns)

    async def get_reward(self):
        return super().get_reward()


OFFER = tool_schema(Numbers().guess)


def test_calls_and_their_results_continue_with_the_sampled_ids():
    """Reasoning that the program drops stays in the prompt, as the template drops it, too; several calls are one answer."""
    choices = []

    async def run(task, chat):
        messages = [SYSTEM, USER]
        for _ in range(2):
            choices.append(await ask(chat, messages, tools=[OFFER], logprobs=True))
            for call in choices[-1].message.tool_calls:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": f"no {call.id}"})
        for message in messages:
            message.pop("reasoning_content", None)
        await ask(chat, [*messages[:-1], asks("and now?")], tools=[OFFER])
        await ask(chat, [SYSTEM, USER], tools=[OFFER], tool_choice="none")
        return 1.0

    texts = [
        f"<think>\nlow\n</think>\n\n{CALL.format(2)}\n{CALL.format(3)}",
        f"<think>\nhm\n</think>\n\n{CALL.format(4)}",
    ]
    played = episode(run, [*texts, "five", "six"])
    assert places(played)[:2] == [(None, 0, False), (0, 3, True)]
    require_extends(played.turns[1], played.turns[0])
    require_extends(played.turns[2], played.turns[1])
    first, prompts = choices[0], decoded(played)
    assert first.finish_reason == "tool_calls"
    assert first.message.reasoning_content == "low"
    assert [json.loads(call.function.arguments) for call in first.message.tool_calls] == [{"number": 2}, {"number": 3}]
    assert len(first.logprobs.content) == len(played.turns[0].response_ids)
    ids = [call.id for call in first.message.tool_calls]
    assert prompts[1].removeprefix(prompts[0] + texts[0]) == (
        f"<|im_end|>\n<|im_start|>user\n<tool_response>\nno {ids[0]}\n</tool_response>\n<tool_response>\nno {ids[1]}\n"
        "</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert "<tools>" not in prompts[3]
    assert played.turns[0].outcome == f"no {ids[0]}\n\nno {ids[1]}"
    second = played.turns[1]
    assert not chat_tokenizer("qwen3").decode(second.prompt_ids[second.insert_at :]).startswith("\n</tool_response>")


def test_branches_of_several_agents_each_continue_their_own():
    """The outcome of a call is what follows in its own conversation, or the result of the episode."""

    async def agent(chat, name):
        messages = [{"role": "system", "content": name}, asks(f"{name} begins")]
        for number in range(2):
            await ask(chat, messages)
            messages.append(asks(f"{name} goes on {number}"))

    async def run(task, chat):
        await asyncio.gather(*(agent(chat, name) for name in "AB"))
        return {"reward": 1.0, "outcome": "done"}

    played = episode(run, "1234")
    assert sorted(place[1:] for place in places(played)) == [(0, False), (0, False), (3, True), (3, True)]
    taken = 0
    for index, turn in enumerate(played.turns):
        if (parent := turn.call.parent) is None:
            assert turn.outcome == f"{turn.call.messages[0]['content']} goes on 0"
            taken += len(turn.prompt_ids) + len(turn.response_ids)
        else:
            assert turn.outcome == "done"
            require_extends(turn, played.turns[parent])
            assert played.successor(parent) == index
    counts = RolloutCounts.of([played]).metrics()
    assert counts["num_branches"] == 2
    assert counts["taken_prompt_rate"] == taken / counts["num_prompt_tokens"]


def test_a_changed_answer_keeps_the_ids_before_it():
    async def run(task, chat):
        messages = [SYSTEM, USER]
        await ask(chat, messages)
        messages.append(asks("more"))
        await ask(chat, messages)
        messages[-1] = {"role": "assistant", "content": "two, trimmed"}
        await ask(chat, [*messages, asks("last")])
        await ask(chat, [SYSTEM, asks("a summary")])
        return 1.0

    played = episode(run, ["one", "two", "three", "four"])
    assert places(played) == [(None, 0, False), (0, 3, True), (1, 4, False), (None, 0, False)]
    second, third = played.turns[1:3]
    require_extends(third, second, second.insert_at)
    assert decoded(played)[2].endswith(
        "two, trimmed<|im_end|>\n<|im_start|>user\nlast<|im_end|>\n<|im_start|>assistant\n"
    )
    assert played.successor(1) == 2
    assert played.successor(2) is None
    assert second.outcome == "last"


def test_dropped_reasoning_starts_anew_where_the_template_keeps_it():
    async def run(task, chat):
        messages = [SYSTEM, USER]
        await ask(chat, messages, tools=[OFFER])
        if task == "drops":
            del messages[-1]["reasoning_content"]
        messages.append({"role": "tool", "tool_call_id": messages[-1]["tool_calls"][0]["id"], "content": "higher"})
        await ask(chat, messages, tools=[OFFER])
        return 1.0

    kept, dropped = (
        episode(run, [f"<think>\nrarely\n</think>\n\n{CALL.format(2)}", "three"], task=task)
        for task in ("keeps", "drops")
    )
    require_extends(kept.turns[1], kept.turns[0])
    require_extends(dropped.turns[1], dropped.turns[0], dropped.turns[0].insert_at)
    assert ["rarely" in decoded(played)[1] for played in (kept, dropped)] == [True, False]


def test_fields_of_clients_are_accepted_and_recorded():
    seen, params = [], []

    async def run(task, chat):
        cut = await ask(
            chat,
            [USER],
            max_completion_tokens=1,
            temperature=0.1,
            stop=["x"],
            seed=3,
            user="u",
            store=False,
            extra_body={"own": 1},
        )
        both = await chat.chat.completions.create(
            model="m", messages=[{"role": "developer", "content": "d"}, USER], n=2
        )
        chunks = await chat.chat.completions.create(
            model="m", messages=[USER, USER], stream=True, stream_options={"include_usage": True}
        )
        streamed = [chunk async for chunk in chunks]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices)
        models = [card.id async for card in chat.models.list()]
        contents = [choice.message.content for choice in both.choices]
        seen.extend([cut.finish_reason, contents, text, streamed[-1].usage.prompt_tokens, models])
        return 1.0

    played = episode(run, ["long answer", "a", "b", "c"], style="conversation", sampled=params)
    assert seen == ["length", ["a", "b"], "c", len(played.turns[3].prompt_ids), ["policy"]]
    assert [param.max_tokens for param in params] == [1, 512, 512, 512]
    assert played.turns[0].call.sampling == {"temperature": 0.1, "stop": ["x"], "seed": 3}
    assert played.turns[0].call.ignored == ["own", "store", "user"]
    assert len({turn.prompt_ids.tobytes() for turn in played.turns[1:3]}) == 1
    assert played.calls == {"received": 4, "answered": 4, "cancelled": 0, "refused": 0}


def test_calls_are_sampled_with_their_own_settings_where_the_run_says_so():
    params = []

    async def run(task, chat):
        await ask(chat, [USER], temperature=0.3, stop="x", seed=3)
        await ask(chat, [USER, USER], stop=["y", "z"], max_tokens=9)
        for own in ({"temperature": 0}, {"top_p": 0.5}, {"temperature": 9}, {"temperature": "hot"}, {"stop": 5}):
            with pytest.raises(openai.BadRequestError):
                await ask(chat, [USER], **own)
        await ask(chat, [USER])
        return 1.0

    played, other = (
        episode(run, "abc", style="conversation", sampled=params, program_sampling="request", seed=seed)
        for seed in (1, 2)
    )
    assert [(param.temperature, param.stop, param.max_tokens) for param in params[:3]] == [
        (0.3, ("x",), 512),
        (1.0, ("y", "z"), 9),
        (1.0, (), 512),
    ]
    assert [turn.temperature for turn in played.turns] == [0.3, 1.0, 1.0]
    assert played.calls["refused"] == other.calls["refused"] == 5
    # The rollouts of a group differ though their calls agree.
    assert len({param.seed for param in params}) == len(params)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"n": 99},
        {"n": 0},
        {"n": True},
        {"messages": [{**USER, "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
        {"messages": []},
        {"tools": [OFFER]},
    ],
)
def test_a_program_that_ends_after_a_refusal_fails_its_rollout(fields):
    """The refusal may come to the program's end in any way: its exception, or its reward."""

    async def run(task, chat):
        await ask(chat, [USER])
        try:
            await chat.chat.completions.create(model="m", **{"messages": [USER], **fields})
        except Exception:
            return 0.0

    played = episode(run, ["x"], style="conversation")
    assert played.ended == "failed"
    assert played.failed_by == "environment"
    assert "refused" in played.error
    assert played.calls == {"received": 2, "answered": 1, "cancelled": 0, "refused": 1}


def test_a_call_with_a_refused_choice_leaves_no_choice_in_the_queue():
    async def run(task, chat):
        with pytest.raises(openai.BadRequestError):
            await chat.chat.completions.create(model="m", messages=[{**USER, "content": "word " * 10_000}], n=2)
        await ask(chat, [USER])
        return 1.0

    played = episode(run, ["x"], style="conversation")
    assert played.calls == {"received": 3, "answered": 1, "cancelled": 1, "refused": 1}


@pytest.mark.parametrize(
    ("run", "cause"),
    [(lambda task, chat: asyncio.sleep(0, 1.0), "first call"), (lambda task, chat: ask(chat, [USER]), "reward")],
)
def test_a_program_without_a_call_or_a_reward_fails_its_rollout(run, cause):
    played = episode(run, ["x"])
    assert played.ended == "failed"
    assert cause in played.error


def test_a_prompt_over_the_limit_is_the_error_that_harnesses_handle():
    """A program that shortens its messages goes on; one that does not is cut."""

    async def run(task, chat):
        await ask(chat, [USER])
        try:
            await ask(chat, [SYSTEM, asks("long " * 200)])
        except openai.BadRequestError as error:
            if task == "gives up":
                raise
            if error.code != "context_length_exceeded":
                return None
        await ask(chat, [SYSTEM, USER])
        return 1.0

    compacts, gives_up = (episode(run, ["x", "y"], task=task, limit=64) for task in ("compacts", "gives up"))
    assert compacts.ended == "terminated"
    assert compacts.error is None
    assert len(compacts.turns) == 2
    assert compacts.success
    assert gives_up.ended == "prompt_limit"
    assert len(gives_up.turns) == 1
    assert gives_up.episode_return == 0.0


def test_a_long_call_keeps_its_system_and_its_last_messages():
    """Calls that follow a shortened one continue its ids until they are too long, too."""

    async def run(task, chat):
        messages = [SYSTEM]
        for number in range(16):
            messages.append(asks(f"question {number}"))
            await ask(chat, messages)
        return 1.0

    played = episode(run, ["yes"] * 16, style="conversation", limit=150, shortens=True)
    assert played.ended == "terminated"
    assert played.error is None
    assert len(played.turns) == 16
    for number, (turn, text) in enumerate(zip(played.turns, decoded(played), strict=True)):
        assert len(turn.prompt_ids) <= 150
        assert SYSTEM["content"] in text
        assert f"question {number}" in text
        if number and turn.prompt_cut == "none":
            require_extends(turn, played.turns[number - 1])
    assert ("history", "none") in pairwise(turn.prompt_cut for turn in played.turns)


@pytest.fixture
def endless(monkeypatch):
    """A function that makes a response that calls ``begin``, then waits until it is cancelled, which ``cancelled`` notes."""
    monkeypatch.setattr("trial_ray.rollout.episode.GIVEN_UP_POLL_S", 0.01)

    def endless(begin, cancelled):
        async def response():
            begin()
            try:
                await asyncio.Future()
            finally:
                cancelled.append(True)

        return response

    return endless


def test_a_call_that_its_client_gives_up_is_not_trained(endless):
    """The policy does not sample it to its end, and the repetition is one turn."""
    cancelled, waits = [], []
    waiting = endless(lambda: waits.append(True), cancelled)

    async def run(task, chat):
        for number in range(2):
            call = asyncio.create_task(ask(chat, [USER]))
            while len(waits) <= number:
                await asyncio.sleep(0.01)
            call.cancel()
            await asyncio.wait([call])
        await ask(chat, [USER])
        return 1.0

    played = episode(run, [waiting, waiting, "x"])
    assert len(played.turns) == 1
    assert len(cancelled) == 2
    assert played.success
    assert played.calls == {"received": 3, "answered": 1, "cancelled": 2, "refused": 0}


def test_a_program_that_is_cut_still_gives_its_reward():
    """Each episode has a client of its own, which the program may close; a program that asks on without end is left."""
    ended = []

    async def endless(task, chat):
        messages = [SYSTEM, USER]
        async with chat:
            try:
                for _ in range(3):
                    await ask(chat, messages)
                    messages.append(USER)
            except Exception:
                if task == "a":
                    return 0.25
                while True:
                    await asyncio.gather(ask(chat, messages), return_exceptions=True)
            finally:
                ended.append(task)

    env = ProgramEnv(endless, {"train": ["a", "b"]}, max_turns=2)
    for task, reward in (("a", 0.25), ("b", 0.0)):
        observation, info = env.reset(options={"task": task})
        assert observation == "user"
        assert info["task"] == "system"
        assert [env.step(answer_action("go"))[1:4] for _ in range(2)] == [(0.0, False, False), (reward, False, True)]
    env.close()
    assert ended == ["a", "b"]


AGENT = """
import os, openai, urllib.request
client = openai.OpenAI(max_retries=0)
def code(**settings):
    try:
        client.with_options(**settings).chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    except openai.APIStatusError as error:
        return error.status_code
codes = [code(api_key="other"), code(base_url=os.environ["OPENAI_BASE_URL"] + "/nowhere")]
print([card.id for card in client.models.list()], codes, code())
"""


def test_an_agent_in_another_process_has_the_policy_at_an_address():
    """The program may block its thread while it waits for the agent; a call that waits at the end is ended."""
    outputs = []

    async def run(task, chat):
        async with local_endpoint(chat) as variables:
            agent = subprocess.run(
                [sys.executable, "-c", AGENT], env=os.environ | variables, capture_output=True, text=True, timeout=60
            )
        outputs.append(agent.stdout.strip() or agent.stderr)
        return 1.0

    played = episode(run, ["x"])
    assert played.success
    assert outputs == ["['policy'] [401, 404] None"]


@pytest.fixture
def pool():
    pool = ThreadPoolExecutor()
    yield pool
    pool.shutdown(wait=False)


def test_a_call_that_waits_when_its_endpoint_closes_gets_status_503(pool):
    calls = []

    async def run(task, chat):
        async with local_endpoint(chat) as variables:
            agent = openai.OpenAI(
                base_url=variables["OPENAI_BASE_URL"], api_key=variables["OPENAI_API_KEY"], max_retries=0
            )
            calls.append(pool.submit(agent.chat.completions.create, model="m", messages=[USER]))
            await asyncio.Future()

    env = ProgramEnv(run, {"train": ["5"]})
    assert env.reset()[0] == "user"
    env.close()
    assert calls[0].exception(60).status_code == 503


def test_an_environment_can_be_closed_while_its_program_waits(pool):
    waiting = threading.Event()

    async def waits(task, chat):
        await ask(chat, [SYSTEM, USER])
        waiting.set()
        await asyncio.Future()

    env = ProgramEnv(waits, {"train": ["a"]})
    env.reset()
    stepping = pool.submit(env.step, answer_action("hello"))
    assert waiting.wait(60)
    env.close()
    with pytest.raises(CancelledError):
        stepping.result(60)


def test_an_action_that_is_no_answer_is_refused():
    env = ProgramEnv(lambda task, chat: ask(chat, [USER]), {"train": ["5"]})
    env.reset()
    with pytest.raises(ValueError, match="'look'"):
        env.step("look")
    env.close()


@pytest.mark.parametrize(
    ("tools", "turns", "max_turns", "number"),
    [(Numbers, 9, None, 4), (AwaitedNumbers, 9, None, 4), (Numbers, 3, None, 3), (AwaitedNumbers, 9, 3, 3)],
)
def test_tools_of_an_object_are_called_as_trl_calls_them(tools, turns, max_turns, number):
    """Exceptions are results, async methods are awaited, several calls carried out, and an episode that is cut has its reward."""
    rows = {"train": [{"prompt": "Guess.", "hidden": 5}]}
    kwargs = cloudpickle.loads(cloudpickle.dumps(tool_program(tools, rows)))
    assert kwargs["tasks"] == {"train": ["train/0"]}
    give_up = '<tool_call>\n{"name": "give_up", "arguments": {}}\n</tool_call>'
    played = episode(
        kwargs["run"],
        [CALL.format(2), f"{CALL.format(9)}\n{give_up}", CALL.format(5), "It is 5."],
        task="train/0",
        turns=turns,
        max_turns=max_turns,
    )
    assert played.success
    assert played.score == 1.0
    assert len(played.turns) == number
    assert played.ended == ("terminated" if number == 4 else "turn_limit")
    assert [message["content"] for message in played.turns[2].call.messages if message["role"] == "tool"] == [
        "higher",
        "{'error': 'too high'}",
        "5",
    ]
    assert played.turns[0].observation == "Guess. Which number?"
    assert [tool["function"]["name"] for tool in played.turns[0].call.tools] == ["give_up", "guess", "range"]


CLIENT = """
import http.client, json, os, sys
host = os.environ["OPENAI_BASE_URL"].split("/")[2]
connection = http.client.HTTPConnection(host)
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
body = json.dumps({"messages": [{"role": "user", "content": sys.argv[1]}]})
connection.request("POST", "/v1/chat/completions", body, headers)
print(json.load(connection.getresponse())["choices"][0]["message"]["content"])
"""


def test_agents_that_are_killed_in_a_call_leave_nothing_behind(endless):
    """Their calls are not sampled to the end, and only the call of the agent that lives is trained."""
    agents, sampled = [], []
    killed = endless(lambda: agents[-1].kill(), sampled)

    async def run(task, chat):
        async with local_endpoint(chat) as variables:
            for number in "1234":
                agents.append(
                    await asyncio.create_subprocess_exec(
                        sys.executable, "-c", CLIENT, number, env=os.environ | variables, stdout=subprocess.PIPE
                    )
                )
                output, _ = await agents[-1].communicate()
        return float(output == b"yes\n")

    played = episode(run, [killed, killed, killed, "yes"])
    assert played.success
    assert len(played.turns) == 1
    assert len(sampled) == 3
    assert played.calls == {"received": 4, "answered": 1, "cancelled": 3, "refused": 0}
    assert [agent.returncode for agent in agents] == [-9, -9, -9, 0]
