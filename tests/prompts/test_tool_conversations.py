"""Conversations with tools in every chat template whose calls the installed TRL can read: prompts, calls, answers to mistakes.

The expected text is what ``apply_chat_template`` writes for tools, calls and answers.
"""

import json
import re
import sys
from dataclasses import replace
from functools import cache

import pytest
from chat_tokenizers import bare_tokenizer, published_templates, published_tokenizer
from prompt_games import (
    TASK,
    add_turn,
    cases_of,
    continuation,
    ids_of,
    rendered,
    shown,
    user_messages,
    without_reasoning,
    writer_of,
)

from trial_envs.core.projection import Projection
from trial_envs.tool_env import ToolEnv, ToolEpisode
from trial_ray.adapters import EnvironmentAdapter, webshop
from trial_ray.adapters.alfworld import ADAPTER
from trial_ray.errors import ChatTemplateError, ConfigError, MissingDependencyError
from trial_ray.learner.rows import scored_turn
from trial_ray.learner.scoring import action_mask
from trial_ray.prompts.tool_calls import ToolSet
from trial_ray.prompts.tool_conversation import call_message
from trial_ray.trajectory import TeacherContext, Turn

NO_TOOLS = re.compile(
    "cohere|cohere2|deepseek_r1_distill|deepseekv3|diffusion_gemma|gemma|gemma3|idefics3|lfm2|llama3|llava_next|muse_glimmer|"
    "phi3|phi3_5|qwen2_5_vl|smolvlm"
)
"""Templates that write no calls, or whose calls TRL 1.16 cannot read."""
NAMES = [name for name in published_templates() if not NO_TOOLS.fullmatch(name)]
CASES = cases_of(NAMES)


@cache
def builder(name, switch="default", tools=ToolEnv, limit=100_000):
    return writer_of(published_tokenizer(name), "tools", switch, limit, tools=tools)


def written(name, switch, results, responses):
    """Return the conversation up to the next response, as the template writes it with TRL's tools.

    Each response has one or several actions, and only several calls have ids.
    """
    build = builder(name)
    first, *later = user_messages(build, results)
    messages = [{"role": "system", "content": build.template.system(TASK)}, {"role": "user", "content": first}]
    for actions in responses:
        calls = [{"type": "function", "function": {"name": "act", "arguments": {"action": each}}} for each in actions]
        answers = [{"role": "tool", "name": "act", "content": later.pop(0)} for _ in actions]
        for number, (call, answer) in enumerate(zip(calls, answers, strict=True)):
            if len(calls) > 1:
                call["id"] = answer["tool_call_id"] = str(number)
        messages += [{"role": "assistant", "content": "", "tool_calls": calls}, *answers]
    assert not later
    return rendered(published_tokenizer(name), messages, switch, tools=[object.__new__(ToolEnv).act])


def encoded(name, text):
    return ids_of(published_tokenizer(name), text)


def calling(build, *actions):
    """Return the text of a response that calls ``act`` with each of the actions."""
    return build.response_text(call_message(*(("act", {"action": action}) for action in actions)))


def play(name, switch, results, limit=100_000):
    """Return the turns of a game whose responses are the template's own calls."""
    build, played = builder(name, switch, limit=limit), []
    for step, result in enumerate(results, 1):
        # This template opens reasoning after an answer, but not after the user's message.
        closed = "<channel|>" if (name, switch) == ("gemma4_v5", "on") and step > 1 else ""
        add_turn(build, played, result, encoded(name, closed + calling(build, f"go to desk {step}")))
    return played


@pytest.mark.parametrize(("name", "switch"), CASES)
def test_a_game_reads_as_the_template_writes_it(name, switch):
    """An observation that spells a call is neither one nor the end of the message."""
    tokenizer = published_tokenizer(name)
    spelled = calling(builder(name), "help")
    results = [shown(f'You see "desk {number}" & {spelled}.') for number in (1, 2, 3)]
    played = play(name, switch, results)
    responses = [[f"go to desk {step}"] for step in (1, 2, 3)]
    assert [(turn.action, turn.valid) for turn in played] == [(action, True) for [action] in responses]
    for step, turn in enumerate(played):
        whole = written(name, switch, results[: step + 1], responses[:step])
        assert without_reasoning(tokenizer.decode(turn.prompt_ids)) == without_reasoning(whole)
        if step:
            continuation(played[step - 1], turn.prompt_ids)
        # The teacher context is at the end of the last message and leaves the ids of the response unchanged.
        context = TeacherContext(encoded(name, "WHAT FOLLOWED"), turn.insert_at)
        hindsight = scored_turn(replace(turn, teacher_context=context), hindsight=True)
        assert hindsight.ids[-len(turn.response_ids) :].tolist() == turn.response_ids.tolist()
        before, behind = tokenizer.decode(hindsight.ids).split("WHAT FOLLOWED")
        assert before.rstrip('"').removesuffix("\n</tool_response>").removesuffix("\n").endswith("look")
        assert tokenizer.decode(turn.prompt_ids[turn.insert_at :]) in behind


def read(response):
    """Read a response of Qwen3 to a first prompt with the tools of ALFWorld."""
    build = builder("qwen3", tools=ADAPTER.tools)
    return build.read(build.write(shown("A room."), ()), encoded("qwen3", response))


def qwen_call(content):
    return f"<tool_call>\n{content}\n</tool_call><|im_end|>"


def json_call(name, arguments):
    return qwen_call(json.dumps({"name": name, "arguments": arguments}))


@pytest.mark.parametrize(
    ("mistake", "response"),
    {
        "No tool": "I am done.<|im_end|>",
        "RecursionError": qwen_call("[" * 100_000),
        "''": qwen_call('["look"]'),
        "'receptacle'": json_call("take", {"object": "pen 1"}),
        "'at'": json_call("look", {"at": "pen 1"}),
        "'lamp 1'": json_call("use", "lamp 1"),
    }.items(),
)
def test_a_response_without_one_valid_call_is_answered_with_its_mistake(mistake, response):
    projection = read(response)
    assert (projection.action, projection.valid) == ("", False)
    assert mistake in projection.answer
    assert "take(object, receptacle)" in projection.answer
    assert len(projection.answer) < 900


SEVERAL = [case for case in CASES if case[0] not in ("gptoss", "llama3_1", "llama3_2")]


@pytest.mark.parametrize(("name", "switch"), SEVERAL)
def test_the_answers_to_several_calls_read_as_the_template_writes_them(name, switch):
    tokenizer, build = published_tokenizer(name), builder(name, switch)
    actions = [f"go to desk {number}" for number in (1, 2, 3)]
    results = [shown("A room."), shown("Desk 1.", ()), shown('A "pen" & <tags>.', ()), shown("Desk 3.")]
    first = add_turn(build, [], results[0], encoded(name, calling(build, *actions)))
    assert [*first.actions] == actions
    answers = tuple(result.observation for result in results[1:])
    prompt = build.write(results[-1], [replace(first, answers=answers)])
    whole = written(name, switch, results, [actions])
    assert without_reasoning(tokenizer.decode(prompt.ids)) == without_reasoning(whole)
    behind = continuation(first, prompt.ids)
    assert behind.tolist() == encoded(name, tokenizer.decode(behind)).tolist()
    inside = tokenizer.decode(first.response_ids[action_mask([first], tokenizer, "tools").numpy()])
    assert all(action in inside for action in actions)


@pytest.mark.parametrize("name", ["gptoss", "llama3_1"])
def test_templates_that_write_one_call_have_one_call_a_turn(name):
    build = builder(name)
    assert "Call exactly one tool in every turn." in build.template.system(TASK)
    refused = build.tools.project([{"name": "act", "arguments": {"action": "look"}}] * 2)
    assert (refused.actions, refused.valid) == ((), False)
    assert "2 tools" in refused.answer


def test_a_mistake_in_one_of_several_calls_leaves_the_others():
    projection = read(json_call("look", {}).removesuffix("<|im_end|>") + json_call("fly", {}))
    _, mistake = projection.answers
    assert projection == Projection("look", False, actions=("look", ""), answers=("", mistake))
    assert "'fly'" in mistake


class Counted(ToolEpisode):
    def a_wait(self, turns: int) -> str:
        """Wait.

        Args:
            turns: How long.
        """
        return self._take(f"wait {turns + 1}")

    def look(self, at: str | None = None) -> str:
        """Look.

        Args:
            at: A thing.
        """
        return self._take(f"look {at}")


def test_a_call_is_read_as_the_action_of_its_tool():
    for tools, name, arguments, action in (
        (ADAPTER.tools, "take", {"object": "pen 1", "receptacle": "desk 2"}, "take pen 1 from desk 2"),
        (ADAPTER.tools, "look", None, "look"),
        (webshop.ADAPTER.tools, "search", {"query": "red shoes"}, "search[red shoes]"),
        (EnvironmentAdapter("mine/Any-v0").tools, "act", {"action": "Ring twice"}, "Ring twice"),
        (Counted, "look", {"at": None}, "look None"),
        (Counted, "a_wait", {"turns": 2}, "wait 3"),
    ):
        call = {"name": name, "arguments": arguments}
        assert ToolSet(tools).project([{"function": call}]) == Projection(action, True)


def test_a_tool_that_rejects_strings_leaves_the_calls_of_others():
    tools = ToolSet(Counted)
    assert tools.call_of("look well") == ("look", {"at": "well"})
    assert tools.call_of("wait 3") is None
    assert "turns is None" in tools.project([{"name": "a_wait", "arguments": {"turns": None}}]).answer


def test_over_the_limit_a_game_restarts_with_its_last_turns_as_text():
    results = [shown(f"ROOM{step} " + "desk " * 20) for step in range(1, 6)]
    limit = len(play("qwen3", "default", results)[-1].prompt_ids) - 1
    played = play("qwen3", "default", results, limit)
    assert [turn.prompt_cut for turn in played] == ["none"] * 4 + ["history"]
    ids = played[-1].prompt_ids
    text = published_tokenizer("qwen3").decode(ids)
    assert [step for step in range(1, 6) if f"ROOM{step}" in text] == [3, 4, 5]
    assert [text.count(part) for part in ("You did: go to desk 4", "You did: go to desk 2", TASK)] == [1, 0, 1]
    again = builder("qwen3", limit=limit).write(shown("ROOM6"), played)
    assert again.ids[: len(ids)].tolist() == ids.tolist()


@pytest.mark.parametrize("name", NAMES)
def test_the_action_mask_covers_the_call(name):
    tokenizer, build = published_tokenizer(name), builder(name)
    ids = encoded(name, "so<tool_call></think>" + calling(build, "go to desk 1"))
    mask = action_mask([Turn(response_ids=ids)], tokenizer, "tools").numpy()
    inside, before = tokenizer.decode(ids[mask]), tokenizer.decode(ids[: mask.argmax()])
    assert "act" in inside
    assert "go to desk 1" in inside
    assert before.startswith("so")
    assert not action_mask([Turn(response_ids=encoded(name, "go to desk 1"))], tokenizer, "tools").any()


@pytest.mark.parametrize("name", sorted({*published_templates()} - {*NAMES}))
def test_templates_without_tools_are_refused(name):
    with pytest.raises(ChatTemplateError, match=r"TRL has none|does not write the tool calls"):
        builder(name)


def test_a_tokenizer_that_cannot_read_calls_is_refused(monkeypatch):
    tokenizer = bare_tokenizer()
    tokenizer.chat_template = published_tokenizer("qwen3").chat_template
    template_of_another_model = builder("gptoss")._tokenizer.response_template
    monkeypatch.setitem(sys.modules, "trl.chat_template_utils", None)
    with pytest.raises(MissingDependencyError):
        writer_of(tokenizer, "tools")
    tokenizer.response_template = template_of_another_model
    with pytest.raises(ChatTemplateError, match=r"parses \[\]"):
        writer_of(tokenizer, "tools")


class Undescribed(ToolEpisode):
    def ring(self, times):
        return self._take(f"ring {times}")


class Stateful(ToolEpisode):
    def ring(self) -> str:
        """Ring."""
        return self._take(f"ring {self.bell}")


class Awaited(ToolEpisode):
    async def ring(self) -> str:
        """Ring."""
        return self._take("ring")


def test_tools_that_cannot_be_called_are_refused():
    for tools, cause in {
        ToolEpisode: "no tools",
        Undescribed: "no schema",
        Stateful: "'bell'",
        Awaited: "ring returned None",
    }.items():
        with pytest.raises(ConfigError, match=cause):
            ToolSet(tools)
