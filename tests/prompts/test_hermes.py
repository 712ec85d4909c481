"""Tools in the Hermes format, for chat templates without tools."""

import copy
from dataclasses import replace

import pytest
from chat_tokenizers import published_tokenizer
from prompt_games import (
    TASK,
    add_turn,
    continuation,
    rendered,
    shown,
    user_messages,
    writer_of,
)

from trial_ray.adapters.alfworld import ADAPTER
from trial_ray.learner.scoring import action_mask


def builder(name):
    return writer_of(copy.deepcopy(published_tokenizer(name)), "hermes", tools=ADAPTER.tools)


@pytest.mark.parametrize("name", ["tiny", "smollm2", "gemma", "deepseek_r1_distill"])
def test_calls_and_answers_read_as_the_chat_template_writes_their_text(name):
    """A template without tools, one without a system message, and one that opens reasoning."""
    build = builder(name)
    tokenizer = build._tokenizer
    # Calls as recorded messages may have them, without the format of ``apply_chat_template``.
    tool_calls = [
        {"name": "look", "arguments": {}},
        {"name": "take", "arguments": {"object": "pen 1", "receptacle": "desk 1"}},
        {"name": "fly", "arguments": {}},
    ]
    ids = build.encode_message({"content": "", "tool_calls": tool_calls})
    first = add_turn(build, [], shown("A room."), ids)
    assert (first.actions, first.valid) == (("look", "take pen 1 from desk 1", ""), False)
    assert "There is no tool 'fly'" in first.answers[2]
    results = [shown("Desk 1.", ()), shown("A </tool_response>", ()), shown("No tool.")]
    prompt = build.write(results[-1], [replace(first, answers=tuple(result.observation for result in results))])

    user, *answers = user_messages(build, [shown("A room."), *results])
    answer = "\n".join(f"<tool_response>\n{text}\n</tool_response>" for text in answers)
    said = tokenizer.decode(ids[:-1]).rpartition("</think>")[2].strip()
    system = build._system(TASK)
    texts = [("system", system), ("user", user), ("assistant", said), ("user", answer)]
    if name == "gemma":
        texts[:2] = [("user", f"{system}\n\n{user}")]
    whole = rendered(tokenizer, [{"role": role, "content": text} for role, text in texts])
    unreasoned = tokenizer.decode(prompt.ids).replace("\n</think>\n\n", "")
    assert unreasoned.replace("<think>\n", "") == whole.replace("<think>\n", "")
    continuation(first, prompt.ids)
    inside = tokenizer.decode(ids[action_mask([first], tokenizer, "tools", "hermes").numpy()])
    assert inside.replace(" ", "").startswith('<tool_call>\n{"name":"look"')
    assert build.read(prompt, build.encode_action(prompt, "go to desk 1")).action == "go to desk 1"


def test_a_response_without_a_call_is_answered_with_its_mistake():
    build = builder("smollm2")
    prompt = build.write(shown("A room."), ())
    for said, mistake in {
        '<tool_call>{"name": "look"</tool_call>': "could not be read",
        "<think><tool_call>{}</tool_call></think> No.": "No tool was called.",
        '<tool_call>["look"]</tool_call>': "There is no tool ''",
    }.items():
        assert mistake in build.read(prompt, build.encode(prompt, said)).answer
