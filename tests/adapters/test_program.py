"""Programs that call a chat model are played, trained and refused as environments."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import threading

import gymnasium
import numpy as np
import pytest
from chat_tokenizers import chat_tokenizer
from prompt_games import rendered, writer_of
from ray import cloudpickle

from trial_envs.local_endpoint import local_endpoint
from trial_envs.program import ProgramEnv, tool_program
from trial_ray.adapters import EnvironmentEntry, program_adapter
from trial_ray.adapters.guarded import GuardedEnv
from trial_ray.algorithms.startup import check_environment
from trial_ray.engines.protocol import Response, SamplingParams
from trial_ray.rollout.episode import PolicyPlayer, play_episode

ANSWERS = ["2", "9", "5", "1"]


SYSTEM, USER = ({"role": role, "content": role} for role in ("system", "user"))


async def ask(chat, messages, **settings):
    """Call the policy and append its answer to the messages."""
    completion = await chat.chat.completions.create(model="policy", messages=messages, **settings)
    messages.append(completion.choices[0].message.model_dump(exclude_none=True))
    return completion.choices[0]


def entry(made, adapter, **kwargs) -> EnvironmentEntry:
    spec = gymnasium.envs.registration.EnvSpec(adapter.env_id, entry_point=made, kwargs=kwargs)
    return EnvironmentEntry(spec, adapter, name="Numbers")


def program(run, **fields) -> EnvironmentEntry:
    return entry(ProgramEnv, program_adapter("test/Program-v0", **fields), run=run, tasks={"train": ["5"]}, max_turns=4)


def episode(played: EnvironmentEntry, texts=ANSWERS, style="conversation", task="5"):
    tokenizer = chat_tokenizer("qwen3")
    answers = iter(texts)

    async def generate(prompt_ids, params):
        ids = [*tokenizer.encode(next(answers), add_special_tokens=False), tokenizer.eos_token_id]
        return Response(np.asarray(ids, np.int32), np.zeros(len(ids), np.float32), 0, "stop")

    writer = writer_of(tokenizer, style, window=4, adapter=played.adapter, tools=played.adapter.tools)
    player = PolicyPlayer(writer, SamplingParams(max_tokens=64), generate)
    env = GuardedEnv(played)
    try:
        return asyncio.run(play_episode(env, task, player))
    finally:
        env.close()


def require_same_turns(turns, expected):
    for turn, other in zip(turns, expected, strict=True):
        assert np.array_equal(turn.prompt_ids, other.prompt_ids)
        assert np.array_equal(turn.response_ids, other.response_ids)
        assert (turn.insert_at, turn.reward) == (other.insert_at, other.reward)


def test_a_program_is_played_with_its_messages_as_prompts():
    tokenizer, shown = chat_tokenizer("qwen3"), []

    async def run(task, chat):
        messages = [SYSTEM]
        for said in ("which number?", "higher", "lower"):
            messages.append({"role": "user", "content": said})
            shown.append(rendered(tokenizer, messages))
            await ask(chat, messages)
        return {"reward": 1.0, "outcome": "found", "rewards": {"steps": 3}}

    played = episode(program(run))
    assert [tokenizer.decode(turn.prompt_ids) for turn in played.turns] == shown
    assert [(turn.action, turn.reward) for turn in played.turns] == [*zip(ANSWERS, (0.0, 0.0, 1.0), strict=False)]
    assert played.turns[-1].outcome == "found"
    assert (played.ended, played.success, played.score, played.rewards) == ("terminated", True, 1.0, {"steps": 3.0})


def test_an_agent_elsewhere_needs_the_key_and_gets_status_503_at_the_end():
    """The request that waits gets it, and a later one on the same connection, which a closed listener does not end."""
    answers, agents = [], []

    def agent(variables):
        connection = http.client.HTTPConnection(variables["OPENAI_BASE_URL"].split("/")[2], timeout=60)
        key, path = variables["OPENAI_API_KEY"], "chat/completions"
        for token, asked in (("other", path), (key, "embeddings"), (key, path), (key, path), (key, path)):
            body = json.dumps({"messages": [SYSTEM, USER]})
            connection.request("POST", f"/v1/{asked}", body, {"Authorization": f"Bearer {token}"})
            with connection.getresponse() as answer:
                answers.append((answer.status, json.load(answer)))

    async def waits(task, chat):
        async with local_endpoint(chat) as variables:
            agents.append(threading.Thread(target=agent, args=(variables,)))
            agents[0].start()
            await asyncio.Event().wait()

    env = ProgramEnv(waits, {"train": ["5"]})
    assert env.reset(options={"task": "5"})[0] == "user"
    assert not env.step("x")[2]
    env.close()
    agents[0].join(60)
    assert [status for status, _ in answers] == [401, 400, 200, 503, 503]
    assert "chat.completions.create only" in answers[1][1]["error"]["message"]
    assert answers[2][1]["choices"][0]["message"]["content"] == "x"


def requests(*conversations, **settings):
    """Return a program that asks the policy once per conversation and returns nothing."""

    async def run(task, chat):
        for messages in conversations:
            await ask(chat, list(messages), **settings)

    return run


def guess(number: int) -> str:
    """Guesses the number.

    Args:
        number: From 1 to 9.
    """
    raise AssertionError("the program answers the call itself")


def program_with_tools(run) -> EnvironmentEntry:
    adapter = program_adapter("test/Program-v0", [guess])
    return entry(ProgramEnv, adapter, run=run, tasks={"train": ["5"]}, max_turns=4, tools=[guess])


CALL = '<tool_call>\n{{"name": "guess", "arguments": {{"number": {}}}}}\n</tool_call>'
CALLS = ["<think>low</think>\n\n" + CALL.format(2), CALL.format(9), CALL.format(5)]
OFFER = {"type": "function", "function": {"name": "guess", "parameters": {}}}
SEVEN = {"id": "call_2", "type": "function", "function": {"name": "guess", "arguments": '{"number": 7}'}}
OTHER_CALL = [{"role": "assistant", "tool_calls": [SEVEN]}, {"role": "tool", "content": "no"}]
OTHER_WORDS = {"role": "assistant", "content": "other words"}
IMAGE = {"role": "system", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}


@pytest.mark.parametrize(
    ("run", "cause"),
    [
        (requests([SYSTEM, USER], [SYSTEM, USER, OTHER_WORDS, USER]), "one message of the user"),
        (requests([], stream=True), "stream or n"),
        (requests([], temperature=0.1), "temperature"),
        (requests([USER]), "['user']"),
        (requests([IMAGE]), "image_url"),
        (lambda task, chat: asyncio.sleep(0, 1.0), "first call"),
        (requests([SYSTEM, USER]), "got None"),
    ],
)
def test_a_program_that_cannot_be_trained_fails_its_rollout(run, cause):
    failed = episode(program(run))
    assert (failed.ended, failed.failed_by) == ("failed", "environment")
    assert cause in failed.error


@pytest.mark.parametrize(
    ("run", "answer", "cause"),
    [
        (requests([SYSTEM, USER], [SYSTEM, USER, OTHER_WORDS, USER], tools=[OFFER]), "It is 5.", "of system and user"),
        (requests([SYSTEM, USER], [SYSTEM, USER, *OTHER_CALL], tools=[OFFER]), CALLS[0], "one message of the tool"),
        (requests([SYSTEM, USER]), CALLS[0], "got none"),
        (requests([SYSTEM, USER], tools=[OFFER], tool_choice="required"), CALLS[0], "'required'"),
    ],
)
def test_a_program_with_tools_that_cannot_be_trained_fails_its_rollout(run, answer, cause):
    failed = episode(program_with_tools(run), [answer], "tools")
    assert failed.failed_by == "environment"
    assert cause in failed.error


def test_conversations_that_start_together_are_turns_in_sequence():
    async def run(task, chat):
        first, second = await asyncio.gather(*(ask(chat, [SYSTEM, USER]) for _ in range(2)))
        return float(first.message.content + second.message.content == "ab")

    played = episode(program(run), "ab")
    assert (played.success, len(played.turns)) == (True, 2)
    assert np.array_equal(played.turns[0].prompt_ids, played.turns[1].prompt_ids)


def test_a_truncated_program_is_cancelled_before_the_next_episode():
    """Each episode has a client of its own, which the program may close."""
    ended = []

    async def endless(task, chat):
        messages = [SYSTEM]
        try:
            async with chat:
                while True:
                    messages.append(USER)
                    await ask(chat, messages)
        finally:
            ended.append(task)

    env = ProgramEnv(endless, {"train": ["a", "b"]}, max_turns=2)
    for task in ("a", "b"):
        observation, info = env.reset(options={"task": task})
        assert (observation, info["task"]) == ("user", "system")
        assert [env.step("go")[3] for _ in range(2)] == [False, True]
    assert ended == ["a"]
    env.close()
    assert ended == ["a", "b"]


def test_an_environment_can_be_closed_while_its_program_waits():
    waiting, ended = threading.Event(), []

    async def waits(task, chat):
        await ask(chat, [SYSTEM, USER])
        waiting.set()
        await asyncio.Event().wait()

    def step():
        with pytest.raises(asyncio.CancelledError):
            env.step("hello")
        ended.append(True)

    env = ProgramEnv(waits, {"train": ["a"]})
    env.reset()
    thread = threading.Thread(target=step)
    thread.start()
    assert waiting.wait(60)
    env.close()
    thread.join(60)
    assert ended


def summarises(num_before, tools):
    """Return a program with two calls about a summary, after calls whose conversation it drops."""

    async def run(task, chat):
        for system, num_calls in (("long", num_before), ("short", 2)):
            messages = [{"role": "system", "content": system}, {"role": "user", "content": "so far: 2 is too low"}]
            for _ in range(num_calls):
                choice = await ask(chat, messages, **({"tools": [OFFER]} if tools else {}))
                assert choice.finish_reason == ("tool_calls" if tools else "stop")
                call = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id} if tools else USER
                messages.append({**call, "content": "higher"})
        return 1.0

    return run


@pytest.mark.parametrize(
    ("style", "made", "before", "answers"),
    [
        ("conversation", program, ANSWERS[:2], ANSWERS),
        ("tools", program_with_tools, CALLS[:1], [CALL.format(1).replace("guess", "leave"), *CALLS]),
    ],
)
def test_a_restarted_conversation_has_the_prompts_of_a_new_one(style, made, before, answers):
    expected = episode(made(summarises(0, style == "tools")), answers, style)
    if style == "tools":  # the mistake takes a turn, and no step of the environment
        mistake, following, _ = expected.turns
        assert (mistake.valid, mistake.invalid_action, following.invalid_action) == (False, True, False)
        assert mistake.outcome == following.observation
        assert mistake.outcome.startswith("There is no tool 'leave'")
    played = episode(made(summarises(len(before), style == "tools")), [*before, *answers], style)
    assert (expected.success, played.success) == (True, True)
    again = played.turns[len(before) :]
    assert [turn.prompt_cut for turn in again] == ["history", *["none"] * (len(expected.turns) - 1)]
    require_same_turns(again, expected.turns)
    assert played.turns[len(before) - 1].outcome == "so far: 2 is too low"


def test_an_answer_without_a_call_goes_to_the_program():
    async def asks_in_words(task, chat):
        choice = await ask(chat, [SYSTEM, USER], tools=[OFFER])
        return {"reward": float(choice.message.content == "It is 5."), "outcome": choice.finish_reason}

    made = program_with_tools(asks_in_words)
    start = check_environment(made, ["5"], style="tools", reward="return", teacher_context=None)
    assert (start.task, start.observation, made.max_turns) == ("system", "user", 4)
    played = episode(made, ["<think>so</think>\n\nIt is 5."], "tools")
    assert (played.success, played.turns[-1].outcome, played.turns[-1].valid) == (True, "stop", True)


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

    async def get_reward(self):
        return float(self.found)


def test_tools_of_an_object_are_called_as_trl_calls_them():
    """Exceptions are results, async tools are awaited, and an answer without a call is the last answer."""
    row = {"prompt": [{"role": "user", "content": [{"type": "text", "text": "Guess."}]}], "hidden": 5}
    kwargs = cloudpickle.loads(cloudpickle.dumps(tool_program(Numbers, {"train": [row]})))
    env = entry(ProgramEnv, program_adapter("test/Program-v0", kwargs["tools"]), max_turns=9, **kwargs)
    give_up = '<tool_call>\n{"name": "give_up", "arguments": {}}\n</tool_call>'
    played = episode(env, [CALL.format(2), CALL.format(9), give_up, CALL.format(5), "It is 5."], "tools", "train/0")
    assert (played.ended, played.success, played.score) == ("terminated", True, 1.0)
    prompt = chat_tokenizer("qwen3").decode(played.turns[-1].prompt_ids)
    results = re.findall(r"<tool_response>\n(.*)\n</tool_response>", prompt)
    assert results == ["higher", "{'error': 'too high'}", "5", "found"]
    assert "Guess. Which number?" in prompt
    assert "Use the tools.\n\nGuess." in prompt, "the system message, which a conversation over the limit keeps"
    assert [tool.__name__ for tool in kwargs["tools"]] == ["give_up", "guess", "range"]
    with pytest.raises(TypeError):
        program_adapter("test/Program-v0", [Numbers.guess])


def test_an_action_without_a_call_of_the_tools_is_refused():
    env = program_with_tools(requests([SYSTEM, USER], tools=[OFFER])).make()
    env.reset()
    with pytest.raises(ValueError, match=r"program_tools\(guess\).*'look'"):
        env.step("look")
    env.close()
