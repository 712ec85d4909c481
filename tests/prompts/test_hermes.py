"""Tools in the Hermes format, for chat templates without tools."""

import copy
from dataclasses import replace

import pytest
from chat_tokenizers import published_tokenizer
from prompt_games import DATE, TASK, add_turn, message, rendered, shown

from trial_ray.adapters.alfworld import ADAPTER
from trial_ray.learner.scoring import action_mask
from trial_ray.prompts.chat_template import TemplateOptions
from trial_ray.prompts.hermes import HermesBuilder


def builder(name):
    tokenizer = copy.deepcopy(published_tokenizer(name))
    return HermesBuilder(tokenizer, ADAPTER.template("tools"), ADAPTER.tools, 100_000, 2, TemplateOptions({}, DATE))


@pytest.mark.parametrize("name", ["tiny", "smollm2", "gemma", "deepseek_r1_distill"])
def test_calls_and_answers_read_as_the_chat_template_writes_their_text(name):
    """A template without tools, one without a system message, and one that opens reasoning."""
    build = builder(name)
    tokenizer = build._tokenizer
    calls = [("look", {}), ("take", {"object": "pen 1", "receptacle": "desk 1"}), ("fly", {})]
    tool_calls = [{"name": tool, "arguments": arguments} for tool, arguments in calls]
    ids = build.encode_message({"content": "", "tool_calls": tool_calls})
    first = add_turn(build, [], shown("A room."), ids)
    assert (first.actions, first.valid) == (("look", "take pen 1 from desk 1", ""), False)
    assert "There is no tool 'fly'" in first.answers[2]
    results = [shown("Desk 1.", ()), shown("A </tool_response>", ()), shown("No tool.")]
    prompt = build.write(results[-1], [replace(first, answers=tuple(result.observation for result in results))])

    texts = [message(build, result, step) for step, result in enumerate(results, 2)]
    answer = "\n".join(f"<tool_response>\n{text}\n</tool_response>" for text in texts)
    said = tokenizer.decode(ids[:-1]).rpartition("</think>")[2].strip()
    system, user = build._system(TASK), message(build, shown("A room."))
    head = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    if name == "gemma":
        head = [{"role": "user", "content": f"{system}\n\n{user}"}]
    rest = [{"role": "assistant", "content": said}, {"role": "user", "content": answer}]
    whole = rendered(tokenizer, [*head, *rest])
    assert tokenizer.decode(prompt.ids).replace("\n</think>\n\n", "").replace("<think>\n", "") == whole.replace(
        "<think>\n", ""
    )
    before = [*first.prompt_ids, *first.response_ids]
    assert prompt.ids[: len(before)].tolist() == before
    inside = tokenizer.decode(ids[action_mask([first], tokenizer, "tools", "hermes").numpy()])
    assert inside.replace(" ", "").startswith('<tool_call>\n{"name":"look"')
    assert build.read(prompt, build.encode_action(prompt, "go to desk 1")).action == "go to desk 1"


@pytest.mark.parametrize(
    ("said", "mistake"),
    [
        ('<tool_call>{"name": "look"</tool_call>', "could not be read"),
        ("<think><tool_call>{}</tool_call></think> No.", "No tool was called."),
        ('<tool_call>["look"]</tool_call>', "There is no tool ''"),
    ],
)
def test_a_response_without_a_call_is_answered_with_its_mistake(said, mistake):
    build = builder("smollm2")
    prompt = build.write(shown("A room."), ())
    assert mistake in build.read(prompt, build.encode(prompt, said)).answer
