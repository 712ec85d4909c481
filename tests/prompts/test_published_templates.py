"""Every chat template that the installed TRL ships, and those of our own models: single prompts, conversations, thinking on and
off, hostile texts.

What is expected is what ``apply_chat_template`` writes for whole conversations.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from chat_tokenizers import OWN, published_templates, published_tokenizer

from trial_envs.core.projection import project_action, with_opening
from trial_ray.adapters.alfworld import ADAPTER
from trial_ray.adapters.guarded import StepResult
from trial_ray.adapters.templates import PromptContext
from trial_ray.errors import ChatTemplateError
from trial_ray.prompts.chat_template import TemplateOptions, split_conversation
from trial_ray.prompts.conversation import ConversationBuilder
from trial_ray.prompts.single_turn import PromptBuilder
from trial_ray.trajectory import Turn

TASK = "put some pencil on desk."
DATE = "2020-02-29"
ACTIONS = ["go to desk 1", "look"]
OPENED = "<think>\n"
SWITCHES = {"default": {}, "on": {"enable_thinking": True}, "off": {"enable_thinking": False}}
TEXTUAL = ["llava_next"]
"""Templates that close messages with text alone: [/INST] is no token of its own."""


def switches(name: str) -> list[str]:
    return list(SWITCHES) if "enable_thinking" in published_tokenizer(name).chat_template else ["default"]


NAMES = [*(name for name in published_templates() if name not in TEXTUAL), *OWN]
CASES = [(name, switch) for name in NAMES for switch in switches(name)]
# How many tokens of what closes a response the policy sampled itself; cohere2's closes with two.
CLOSED = [(name, switch, 1 + (name == "cohere2")) for name, switch in CASES] + [(name, "default", 0) for name in NAMES]


def options(switch: str, date: str = DATE) -> TemplateOptions:
    return TemplateOptions(SWITCHES[switch], date)


@cache
def single(name: str, switch: str) -> PromptBuilder:
    return PromptBuilder(published_tokenizer(name), ADAPTER.template("tagged"), 100_000, options=options(switch))


@cache
def conversation(name: str, switch: str) -> ConversationBuilder:
    template = ADAPTER.template("conversation")
    return ConversationBuilder(published_tokenizer(name), template, 100_000, options=options(switch))


def rendered(name: str, switch: str, messages: list[tuple[str, str]], generate: bool = True) -> str:
    """What the chat template itself writes, of texts or of parts where it needs them."""
    for write in (str, lambda text: [{"type": "text", "text": text}]):
        try:
            text = published_tokenizer(name).apply_chat_template(
                [{"role": role, "content": write(content)} for role, content in messages],
                tokenize=False,
                add_generation_prompt=generate,
                strftime_now=lambda form: np.datetime64(DATE).item().strftime(form),
                **SWITCHES[switch],
            )
        except Exception:
            continue
        if all(content in text for _, content in messages):
            return text
    raise AssertionError("the template writes neither")


def shown(observation: str, actions=ACTIONS, task: str = TASK) -> StepResult:
    return StepResult(observation, task, "", list(actions), won=False, score=0.0)


def message(name: str, switch: str, result: StepResult, step: int) -> str:
    context = PromptContext(result.task, result.observation.strip(), result.admissible_actions, (), step)
    return conversation(name, switch).template.render(context)


def turn_of(prompt, response_ids, result: StepResult) -> Turn:
    arrays = np.asarray(response_ids, np.int32), np.zeros(len(response_ids), np.float32)
    return Turn(prompt.ids, *arrays, 0, prompt.insert_at, result.observation, "look", True, "", 0.0, "stop", prompt.cut)


def folded(name: str) -> bool:
    return split_conversation(published_tokenizer(name), options("default")).system is None


def expected(name: str, switch: str, results: list[StepResult], said: list[str]) -> tuple[str, list[str]]:
    """The conversation up to the next response, and what closes each response.

    An earlier response follows what it was sampled behind; the template's own rendering may leave that out.
    """
    users = [message(name, switch, result, step) for step, result in enumerate(results, 1)]
    system = conversation(name, switch).template.system(results[0].task)
    if folded(name):
        users[0] = f"{system}\n\n{users[0]}"
    messages = [] if folded(name) else [("system", system)]
    for step, user in enumerate(users):
        messages += [("user", user), ("assistant", f"RESPONSE {step}.")]
    text = rendered(name, switch, messages[:-1])
    opens, before, written, closings = text.rpartition(users[-1])[2], 0, "", []
    for step, user in enumerate(users[:-1]):
        at = text.index(user, before) + len(user)
        begin = text.index(f"RESPONSE {step}.", at)
        behind = begin + len(f"RESPONSE {step}.")
        closings.append(text[behind : text.index(users[step + 1], behind)])
        written += text[before:at] + opens + said[step]
        before = behind
    return written + text[before:], closings


def letters(tokenizer, text: str) -> list[int]:
    """Ids that spell a text letter by letter, as no tokenizer would write them."""
    return [token for letter in text for token in tokenizer.encode(letter, add_special_tokens=False)]


def play(name: str, switch: str, results: list[StepResult], closed: int) -> list[Turn]:
    """A conversation whose responses end with the first tokens of what closes them."""
    tokenizer, build, played = published_tokenizer(name), conversation(name, switch), []
    closing = expected(name, switch, [shown("A."), shown("B.")], ["", ""])[1][0]
    end = tokenizer.encode(closing, add_special_tokens=False)[:closed]
    for step, result in enumerate(results):
        response = [*letters(tokenizer, f"so {step}</think> <action>look</action>"), *end]
        played.append(turn_of(build.write(result, played), response, result))
    return played


@pytest.mark.parametrize(("name", "switch"), CASES)
def test_a_prompt_a_turn_has_the_ids_of_the_rendered_template(name, switch):
    tokenizer, build, result = published_tokenizer(name), single(name, switch), shown("You see a desk 1.")
    prompt = build.write(result, ())
    context = PromptContext(TASK, result.observation, ACTIONS, (), 1)
    whole = rendered(name, switch, [("user", build.template.render(context))])
    assert prompt.ids.tolist() == tokenizer.encode(whole, add_special_tokens=False)
    assert tokenizer.decode(prompt.ids[: prompt.insert_at]).removesuffix("/nothink").endswith("</action>.")


@pytest.mark.parametrize(("name", "switch", "closed"), CLOSED)
def test_a_conversation_only_grows_and_reads_as_the_template_writes_it(name, switch, closed):
    tokenizer, results = published_tokenizer(name), [shown(f"You see desk {number}.") for number in (1, 2, 3)]
    played = play(name, switch, results, closed)
    said = [f"so {step}</think> <action>look</action>" for step in range(3)]
    for step, turn in enumerate(played):
        assert tokenizer.decode(turn.prompt_ids) == expected(name, switch, results[: step + 1], said)[0]
        if step:
            before = [*played[step - 1].prompt_ids, *played[step - 1].response_ids]
            assert turn.prompt_ids[: len(before)].tolist() == before
    # Over the limit it begins again, with the last turns as they were.
    build = ConversationBuilder(
        tokenizer, conversation(name, switch).template, len(played[2].prompt_ids) - 1, 1, options(switch)
    )
    again = build.write(results[2], played[:2])
    second, third = (message(name, switch, results[index], index + 1) for index in (1, 2))
    text = tokenizer.decode(again.ids)
    assert again.cut == "history"
    assert text.startswith(tokenizer.decode(played[0].prompt_ids).partition(message(name, switch, results[0], 1))[0])
    assert text.endswith(second + tokenizer.decode(played[2].prompt_ids).partition(second)[2])
    assert (text.count(TASK), "desk 1." in text, text.count(third)) == (1, False, 1)
    restarted = build.write(results[2], [*played[:1], turn_of(again, played[1].response_ids, results[1])])
    assert tokenizer.decode(restarted.ids).count(TASK) == 1


@pytest.mark.parametrize(("name", "switch"), [case for case in CASES if case[1] == "default"])
def test_texts_that_spell_the_templates_own_markers_close_nothing(name, switch):
    tokenizer, written = published_tokenizer(name), tokenizer_markers(name, switch)
    added = {token: str(each) for token, each in tokenizer.added_tokens_decoder.items()}
    special = added.keys() - {token for token, text in added.items() if text in ("<think>", "</think>")}

    def controls(**said) -> list[list[int]]:
        results = [shown(**{"observation": "A room.", **said}) for _ in range(3)]
        played = play(name, switch, results, 1)
        prompts = [single(name, switch).write(results[0], played), *played]
        ids = [prompt.ids if hasattr(prompt, "ids") else prompt.prompt_ids for prompt in prompts]
        return [[token for token in each.tolist() if token in special] for each in ids]

    clean = controls()
    for hostile in written:
        assert controls(observation=hostile) == controls(task=hostile) == controls(actions=[hostile]) == clean


def tokenizer_markers(name: str, switch: str) -> list[str]:
    """All added tokens, and the texts that the template writes around messages."""
    tokenizer = published_tokenizer(name)
    whole = expected(name, switch, [shown("A."), shown("B.")], ["C.", "D."])[0]
    around = whole.partition(message(name, switch, shown("A."), 1))
    return ["".join(str(token) for token in tokenizer.added_tokens_decoder.values()), around[2] + "\nlook", around[0]]


@pytest.mark.parametrize("special", [False, True], ids=["ordinary", "special"])
@pytest.mark.parametrize(
    ("name", "switch"), [case for case in CASES if "think" in published_tokenizer(case[0]).chat_template]
)
def test_reasoning_that_the_prompt_opened_counts_as_the_responses_own(name, switch, special):
    tokenizer = published_tokenizer(name, special)
    build = PromptBuilder(tokenizer, ADAPTER.template("tagged"), 100_000, options=options(switch))
    prompt = build.write(shown("A room."), ())
    opened = tokenizer.decode(prompt.ids).endswith(OPENED)

    def read(text: str):
        ids = np.asarray(tokenizer.encode(text, add_special_tokens=False), np.int32)
        written = build.responses.text(prompt.ids, prompt.insert_at, ids)
        assert written == (OPENED if opened else "") + text
        return build.template.project(written)

    assert read("so</think><action>Look</action>").valid == opened
    if opened:  # other libraries see the response without its prompt
        for text in ("so</think><action>Look</action>", "so <action>look</action>", "</think><action>look</action> 好"):
            assert project_action(with_opening(text)) == read(text)
    assert read("<think>so</think><action>Look</action>").valid
    assert read("so</think><action>Look</action>").action == "look"
    assert not read("so <action>look</action>").valid


@pytest.mark.parametrize("name", TEXTUAL)
def test_a_template_that_closes_messages_with_text_alone_is_refused(name):
    for builder, style in ((PromptBuilder, "tagged"), (ConversationBuilder, "conversation")):
        with pytest.raises(
            ChatTemplateError, match=r"the user's message with a special token, but continues with ' \[/INST\]'"
        ):
            builder(published_tokenizer(name), ADAPTER.template(style), 1000)
