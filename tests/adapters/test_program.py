"""Programs that call a chat model are played, trained and refused as environments."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import sys
import threading

import gymnasium
import numpy as np
import openai
import pytest
from chat_tokenizers import chat_tokenizer
from ray import cloudpickle

from trial_envs.core.projection import project_action
from trial_envs.local_endpoint import local_endpoint
from trial_envs.program import ProgramEnv, tool_program
from trial_envs.tool_env import ToolEpisode
from trial_ray.adapters import EnvironmentAdapter, EnvironmentEntry, program_adapter
from trial_ray.adapters.check import check_environment
from trial_ray.adapters.guarded import GuardedEnv
from trial_ray.adapters.templates import PromptContext, TaggedTemplate
from trial_ray.engines.protocol import Response, SamplingParams
from trial_ray.prompts.conversation import ConversationBuilder
from trial_ray.prompts.tool_conversation import ToolConversationBuilder
from trial_ray.rollout.episode import PolicyPlayer, play_episode

TASK = "find the number"
ANSWERS = ["<think>low</think><action>2</action>", "<action>9</action>", "<action>5</action>", "<action>1</action>"]
TEMPLATE = EnvironmentAdapter("test/Numbers-v0", templates={"tagged": TaggedTemplate("You guess.")}).template(
    "conversation"
)


def hint(guess: str, hidden: int) -> str:
    return "found" if guess == str(hidden) else "higher" if guess < str(hidden) else "lower"


class NumberEnv(gymnasium.Env):
    """The game as an environment."""

    max_turns = 4

    def tasks(self, split):
        return ["5"]

    def reset(self, *, seed=None, options=None):
        self.hidden = int(options["task"])
        return "which number?", {"task": TASK}

    def step(self, action):
        said = hint(action, self.hidden)
        return said, float(said == "found"), said == "found", False, {"task": TASK, "won": said == "found"}


async def play(task, chat):
    """The game as a program, which writes what the environment's template writes."""
    said, messages = "which number?", [{"role": "system", "content": TEMPLATE.system(TASK)}]
    for step in range(1, 5):
        shown = TEMPLATE.render(PromptContext(TASK, said, (), (), step))
        messages.append({"role": "user", "content": shown})
        answer = await chat.chat.completions.create(model="policy", messages=messages)
        messages.append(answer.choices[0].message.model_dump(exclude_none=True))
        said = hint(project_action(messages[-1]["content"]).action, int(task))
        if said == "found":
            return {"reward": 1.0, "outcome": said, "rewards": {"steps": step}}
    return 0.0


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

    template = played.adapter.template(style)
    if style == "tools":
        writer = ToolConversationBuilder(tokenizer, template, played.adapter.tools, 100_000, 4)
    else:
        writer = ConversationBuilder(tokenizer, template, 100_000, 4)
    player = PolicyPlayer(writer, SamplingParams(max_tokens=64), generate)
    env = GuardedEnv(played)
    try:
        return asyncio.run(play_episode(env, task, player))
    finally:
        env.close()


AGENT = """
import json, os, sys, urllib.request


def post(key=os.environ["OPENAI_API_KEY"], path="/chat/completions", **fields):
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(fields).encode())
    request.add_header("Authorization", f"Bearer {key}")
    try:
        return json.load(urllib.request.urlopen(request))
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]["message"]


prompts, messages = json.load(sys.stdin), []
assert post(key="other")[0] == 401
assert post(path="/embeddings") == (400, "/v1/embeddings: the policy answers chat.completions.create only")
assert "temperature" in post(messages=[], temperature=0.5)[1]
for prompt in prompts:
    messages += prompt
    messages.append(post(model="policy", messages=messages)["choices"][0]["message"])
"""


async def play_elsewhere(task, chat):
    """The game, played by an agent in another process, which has only the address and the key."""
    shown = enumerate(["which number?", "higher", "lower"], 1)
    users = [TEMPLATE.render(PromptContext(TASK, said, (), (), step)) for step, said in shown]
    prompts = [[{"role": "user", "content": user}] for user in users]
    prompts[0].insert(0, {"role": "system", "content": TEMPLATE.system(TASK)})
    async with local_endpoint(chat) as variables:
        agent = await asyncio.create_subprocess_exec(
            sys.executable, "-c", AGENT, stdin=asyncio.subprocess.PIPE, env={**os.environ, **variables}
        )
        await agent.communicate(json.dumps(prompts).encode())
    assert agent.returncode == 0
    return {"reward": 1.0, "outcome": "found", "rewards": {"steps": 3}}


@pytest.mark.parametrize("run", [play, play_elsewhere])
def test_a_program_and_an_environment_of_the_same_messages_have_the_same_turns(run):
    adapter = EnvironmentAdapter("test/Numbers-v0", templates={"conversation": TEMPLATE})
    expected, found = episode(entry(NumberEnv, adapter)), episode(program(run))
    assert expected.ended == found.ended == "terminated"
    assert len(found.turns) == len(expected.turns) == 3
    for one, other in zip(found.turns, expected.turns, strict=True):
        assert np.array_equal(one.prompt_ids, other.prompt_ids)
        assert np.array_equal(one.response_ids, other.response_ids)
        assert (one.insert_at, one.reward) == (other.insert_at, other.reward)
    assert found.turns[-1].outcome == "found"
    assert (found.success, found.score, found.rewards) == (True, 1.0, {"steps": 3.0})


def test_an_agent_in_another_process_is_told_that_its_episode_has_ended():
    told = []

    def ask(variables):
        messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
        client = openai.OpenAI(
            base_url=variables["OPENAI_BASE_URL"], api_key=variables["OPENAI_API_KEY"], max_retries=0
        )
        with client, pytest.raises(openai.InternalServerError) as failure:
            client.chat.completions.create(model="policy", messages=messages)
        told.append((failure.value.status_code, failure.value.message))

    async def waits(task, chat):
        async with local_endpoint(chat) as variables:
            agents.append(threading.Thread(target=ask, args=(variables,)))
            agents[-1].start()
            await asyncio.Event().wait()

    agents = []
    env = ProgramEnv(waits, {"train": ["5"]})
    assert env.reset(options={"task": "5"})[0] == "u"
    env.close()
    agents[0].join(60)
    ((status, message),) = told
    assert status == 503
    assert "the episode has ended" in message


def test_a_request_after_the_endpoint_closed_is_no_turn():
    """Clients keep a connection, which a closed listener does not end."""
    statuses = []

    def post(connection, key, messages):
        body = json.dumps({"model": "policy", "messages": messages})
        connection.request("POST", "/v1/chat/completions", body, {"Authorization": f"Bearer {key}"})
        answer = connection.getresponse()
        answer.read()
        statuses.append(answer.status)

    async def late(task, chat):
        messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
        async with local_endpoint(chat) as variables:
            host, key = variables["OPENAI_BASE_URL"].split("/")[2], variables["OPENAI_API_KEY"]
            connection = http.client.HTTPConnection(host, timeout=60)
            await asyncio.to_thread(post, connection, key, messages)
        await asyncio.to_thread(post, connection, key, messages)
        connection.close()
        return 1.0

    env = ProgramEnv(late, {"train": ["5"]})
    env.reset()
    assert env.step("x")[2], "the program has returned"
    env.close()
    assert statuses == [200, 503]


async def rewrites(task, chat):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    await chat.chat.completions.create(model="policy", messages=messages)
    messages += [{"role": "assistant", "content": "other words"}, {"role": "user", "content": "u"}]
    await chat.chat.completions.create(model="policy", messages=messages)


async def samples_its_own_way(task, chat):
    await chat.chat.completions.create(model="policy", temperature=0.1, messages=[])


async def calls_twice(task, chat):
    found = await begins(chat)
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    messages += [found.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "u"}]
    async with asyncio.TaskGroup() as calls:
        for _ in range(2):
            calls.create_task(chat.chat.completions.create(model="policy", messages=messages))


async def begins_with_the_user(task, chat):
    await chat.chat.completions.create(model="policy", messages=[{"role": "user", "content": "u"}])


async def shows_an_image(task, chat):
    content = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    await chat.chat.completions.create(model="policy", messages=[{"role": "system", "content": content}])


async def asks_nothing(task, chat):
    return 1.0


async def returns_nothing(task, chat):
    await begins(chat)


async def asks_for_embeddings(task, chat):
    await chat.embeddings.create(model="policy", input="u")


async def begins(chat):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    return await chat.chat.completions.create(model="policy", messages=messages)


@pytest.mark.parametrize(
    ("run", "told"),
    [
        (
            rewrites,
            "expected messages of the last call, its answer and one message of the user, or system and user, "
            "got ['system', 'user', 'assistant', 'user']; the message {'role': 'assistant', 'content': '<think>low",
        ),
        (samples_its_own_way, "expected messages only, got temperature"),
        (calls_twice, "ExceptionGroup"),
        (begins_with_the_user, "expected messages of system and user, got ['user']"),
        (shows_an_image, "expected a message with a text"),
        (asks_nothing, "ended before it asked the model anything"),
        (returns_nothing, "from the program, got None"),
        (asks_for_embeddings, "the policy answers chat.completions.create only"),
    ],
)
def test_a_program_that_cannot_be_trained_fails_its_rollout_and_says_why(run, told):
    failed = episode(program(run))
    assert (failed.ended, failed.failed_by) == ("failed", "environment")
    assert told in failed.error


def test_conversations_that_start_at_the_same_time_are_turns_one_after_the_other():
    async def run(task, chat):
        first, second = await asyncio.gather(begins(chat), begins(chat))
        return float(first.choices[0].message.content + second.choices[0].message.content == "ab")

    found = episode(program(run), "ab")
    assert (found.success, len(found.turns)) == (True, 2)
    assert np.array_equal(found.turns[0].prompt_ids, found.turns[1].prompt_ids)


def test_a_program_that_is_cut_is_cancelled_before_the_next_episode_begins():
    ended = []

    async def endless(task, chat):
        messages = [{"role": "system", "content": "s"}]
        try:
            while True:
                messages.append({"role": "user", "content": task})
                found = await chat.chat.completions.create(model="policy", messages=messages)
                messages.append({"role": "assistant", "content": found.choices[0].message.content})
        finally:
            ended.append(task)

    env = ProgramEnv(endless, {"train": ["a", "b"]}, max_turns=2)
    for task in ("a", "b"):
        env.reset(options={"task": task})
        assert [env.step("go")[3] for _ in range(2)] == [False, True]
    assert ended == ["a"]
    env.close()
    assert ended == ["a", "b"]


def test_each_episode_has_a_client_of_the_library_which_it_may_close():
    seen = []

    async def run(task, chat):
        async with chat:
            seen.append(chat)
            return float((await begins(chat)).choices[0].message.content == "hello")

    env = ProgramEnv(run, {"train": ["a"]})
    for _ in range(2):
        observation, info = env.reset()
        assert (observation, info["task"]) == ("u", "s")
        assert env.step("hello")[1:3] == (1.0, True)
    assert isinstance(seen[0], openai.AsyncOpenAI)
    env.close()


def test_an_environment_can_be_closed_while_its_program_waits():
    waiting, ended = threading.Event(), []

    async def waits(task, chat):
        await begins(chat)
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


def test_a_program_with_tools_passes_the_check_before_a_run():
    played = program_with_tools(asks_in_words)
    start = check_environment(played, ["5"], style="tools", reward="return", teacher_context=None)
    assert (start.task, start.observation, played.max_turns) == ("s", "u", 4)


def guess(number: int) -> str:
    """Guesses the number.

    Args:
        number: From 1 to 9.
    """
    raise AssertionError("the program answers the call itself")


class NumberTools(ToolEpisode):
    """The tool of the environment."""

    def guess(self, number: int) -> str:
        """Guesses the number.

        Args:
            number: From 1 to 9.
        """
        return self._take(str(number))


CALL = '<tool_call>\n{{"name": "guess", "arguments": {{"number": {}}}}}\n</tool_call>'
CALLS = ["<think>low</think>\n\n" + CALL.format(2), CALL.format(9), CALL.format(5)]
OFFER = {"type": "function", "function": {"name": "guess", "parameters": {}}}


def play_with_tools(template):
    async def run(task, chat):
        shown = template.render(PromptContext(TASK, "which number?", (), (), 1))
        messages = [{"role": "system", "content": template.system(TASK)}, {"role": "user", "content": shown}]
        for step in range(2, 6):
            found = await chat.chat.completions.create(model="policy", messages=messages, tools=[OFFER])
            assert found.choices[0].finish_reason == "tool_calls"
            messages.append(found.choices[0].message.model_dump(exclude_none=True))
            [call] = found.choices[0].message.tool_calls
            said = hint(str(json.loads(call.function.arguments)["number"]), int(task))
            if said == "found":
                return {"reward": 1.0, "outcome": said}
            shown = template.render(PromptContext(TASK, said, (), (), step))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": shown})
        return 0.0

    return run


def test_a_program_whose_tools_are_called_has_the_turns_of_an_environment_with_these_tools():
    adapter = EnvironmentAdapter(
        "test/Numbers-v0", templates={"tagged": TaggedTemplate("You guess.")}, tools=NumberTools
    )
    expected = episode(entry(NumberEnv, adapter), CALLS, "tools")
    found = episode(program_with_tools(play_with_tools(adapter.template("tools"))), CALLS, "tools")
    assert (found.ended, found.success) == (expected.ended, expected.success) == ("terminated", True)
    assert [json.loads(turn.action)["arguments"]["number"] for turn in found.turns] == [2, 9, 5]
    for one, other in zip(found.turns, expected.turns, strict=True):
        assert np.array_equal(one.prompt_ids, other.prompt_ids)
        assert (one.insert_at, one.reward, one.valid) == (other.insert_at, other.reward, True)


def summarises(num_before, tools):
    """Two calls about a summary, after others that they do not show."""
    offer = {"tools": [OFFER]} if tools else {}

    async def call(chat, messages):
        found = await chat.chat.completions.create(model="policy", messages=messages, **offer)
        message = found.choices[0].message.model_dump(exclude_none=True)
        role = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"]} if tools else {"role": "user"}
        messages += [message, {**role, "content": "higher"}]

    async def run(task, chat):
        for system, num_calls in (("long", num_before), ("short", 2)):
            messages = [{"role": "system", "content": system}, {"role": "user", "content": "so far: 2 is too low"}]
            for _ in range(num_calls):
                await call(chat, messages)
        return 1.0

    return run


@pytest.mark.parametrize("style", ["conversation", "tools"])
def test_a_conversation_that_starts_again_has_the_prompts_of_one_that_starts(style):
    made = program_with_tools if style == "tools" else program
    answers = [CALLS[0], CALL.format(1).replace("guess", "leave"), *CALLS[1:]] if style == "tools" else ANSWERS
    before = CALLS[:1] if style == "tools" else ANSWERS[:2]
    expected = episode(made(summarises(0, style == "tools")), answers, style)
    found = episode(made(summarises(len(before), style == "tools")), [*before, *answers], style)
    assert expected.success
    assert found.success
    again = found.turns[len(before) :]
    assert [turn.prompt_cut for turn in again] == ["history", *["none"] * (len(expected.turns) - 1)]
    for one, other in zip(again, expected.turns, strict=True):
        assert np.array_equal(one.prompt_ids, other.prompt_ids)
        assert one.insert_at == other.insert_at
    assert found.turns[len(before) - 1].outcome == "so far: 2 is too low"


async def asks_in_words(task, chat):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    found = await chat.chat.completions.create(model="policy", messages=messages, tools=[OFFER])
    return {"reward": float(found.choices[0].message.content == "It is 5."), "outcome": found.choices[0].finish_reason}


async def goes_on_after_words(task, chat):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    found = await chat.chat.completions.create(model="policy", messages=messages, tools=[OFFER])
    messages += [found.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "go on"}]
    await chat.chat.completions.create(model="policy", messages=messages, tools=[OFFER])


async def demands_a_call(task, chat):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    await chat.chat.completions.create(model="policy", messages=messages, tools=[OFFER], tool_choice="required")


async def answers_another_call(task, chat):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    await chat.chat.completions.create(model="policy", messages=messages, tools=[OFFER])
    calls = [{"id": "call_2", "type": "function", "function": {"name": "guess", "arguments": '{"number": 7}'}}]
    messages += [{"role": "assistant", "content": None, "tool_calls": calls}, {"role": "tool", "content": "no"}]
    await chat.chat.completions.create(model="policy", messages=messages, tools=[OFFER])


@pytest.mark.parametrize(
    ("run", "answers", "told"),
    [
        (goes_on_after_words, ["It is 5."], "expected messages of system and user, got"),
        (
            answers_another_call,
            CALLS,
            "expected messages of the last call, its answer and one message of the tool, or system and user, got",
        ),
        (play, CALLS, "expected the tools guess, got none"),
        (demands_a_call, CALLS, "expected tool_choice='auto', got 'required'"),
    ],
)
def test_a_conversation_with_tools_that_cannot_be_trained_fails_its_rollout_and_says_why(run, answers, told):
    failed = episode(program_with_tools(run), answers, "tools")
    assert failed.failed_by == "environment"
    assert told in failed.error


def test_an_answer_without_a_call_is_the_programs():
    found = episode(program_with_tools(asks_in_words), ["<think>so</think>\n\nIt is 5."], "tools")
    assert (found.success, found.turns[-1].outcome, found.turns[-1].valid) == (True, "stop", True)


def program_with_tools(run) -> EnvironmentEntry:
    adapter = program_adapter("test/Program-v0", [guess])
    return entry(ProgramEnv, adapter, run=run, tasks={"train": ["5"]}, max_turns=4, tools=[guess])


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
        return hint(str(number), self.hidden)

    async def give_up(self) -> int:
        """Tells the number."""
        return self.hidden

    async def get_reward(self):
        return float(self.found)


def test_tools_of_an_object_are_called_as_trl_calls_them():
    """Exceptions are results, async tools are awaited; an answer without a call is the last one."""
    row = {"prompt": [{"role": "user", "content": [{"type": "text", "text": "Guess."}]}], "hidden": 5}
    kwargs = cloudpickle.loads(cloudpickle.dumps(tool_program(Numbers, {"train": [row]})))
    played = entry(ProgramEnv, program_adapter("test/Program-v0", kwargs["tools"]), max_turns=9, **kwargs)
    tell = '<tool_call>\n{"name": "give_up", "arguments": {}}\n</tool_call>'
    found = episode(played, [CALL.format(2), CALL.format(9), tell, CALL.format(5), "It is 5."], "tools", "train/0")
    assert (found.ended, found.success, found.score) == ("terminated", True, 1.0)
    prompt = chat_tokenizer("qwen3").decode(found.turns[-1].prompt_ids)
    assert re.findall(r"<tool_response>\n(.*)\n</tool_response>", prompt) == [
        "higher",
        "{'error': 'too high'}",
        "5",
        "found",
    ]
    assert "Guess. Which number?" in prompt
    assert "Use the tools.\n\nGuess." in prompt, "in the message that a conversation over the limit keeps"
    assert [each.__name__ for each in kwargs["tools"]] == ["give_up", "guess", "range"]
    with pytest.raises(TypeError, match=r"expected a function or a method of an object, got Numbers\.guess of a class"):
        program_adapter("test/Program-v0", [Numbers.guess])


def test_an_action_of_other_tools_is_named():
    env = ProgramEnv(asks_in_words, {"train": ["5"]}, tools=[guess])
    env.reset()
    with pytest.raises(ValueError, match=r"expected an action of program_tools\(guess\), got 'look'"):
        env.step("look")
    env.close()
