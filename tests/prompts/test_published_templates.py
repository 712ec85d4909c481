"""Every chat template that the installed TRL ships, and those of this package's models: single-turn prompts, conversations,
reasoning on and off, hostile texts.

The expected text is what ``apply_chat_template`` writes for whole conversations.
"""

import itertools
from functools import cache

import pytest
from chat_tokenizers import OWN, published_templates, published_tokenizer
from prompt_games import (
    DATE,
    TASK,
    add_turn,
    cases_of,
    continuation,
    controls,
    ids_of,
    letters,
    message,
    rendered,
    shown,
    turn_of,
    user_messages,
    writer_of,
)

from trial_envs.core.projection import Projection, project_action, with_opening
from trial_ray.errors import ChatTemplateError
from trial_ray.prompts.chat_template import TemplateOptions, split_conversation

SAID = [f"so {step}</think> <action>look</action>" for step in range(3)]
TEXTUAL = "llava_next"
"""Template that closes messages with text alone: [/INST] is no token of its own."""


NAMES = [*(name for name in published_templates() if name != TEXTUAL), *OWN]
CASES = cases_of(NAMES)
# The third item is the number of closing tokens that the policy sampled itself; cohere2 closes a response with two tokens.
CLOSED = [(name, switch, 1 + (name == "cohere2")) for name, switch in CASES]
CLOSED += [(name, "default", 0) for name in ("cohere2", "gemma", "qwen3")]


@cache
def writer(name, switch, style="conversation"):
    return writer_of(published_tokenizer(name), style, switch)


def written(name, switch, messages):
    """Return what the chat template itself writes for texts, or for parts if it needs parts."""
    in_parts = name in ("idefics3", "smolvlm")
    contents = [
        {"role": role, "content": [{"type": "text", "text": text}] if in_parts else text} for role, text in messages
    ]
    return rendered(published_tokenizer(name), contents, switch)


def expected(name, switch, results, said):
    """Return the conversation up to the next response, and the text that closes a response.

    Every earlier response follows the opening behind which it was sampled, which the template's own rendering may omit.
    """
    users = user_messages(writer(name, switch), results)
    system = writer(name, switch).template.system(results[0].task)
    messages = [("system", system)]
    if split_conversation(published_tokenizer(name), TemplateOptions(date=DATE)).system is None:
        messages, users[0] = [], f"{system}\n\n{users[0]}"
    for step, user in enumerate(users):
        messages += [("user", user), ("assistant", f"RESPONSE {step}.")]
    text = written(name, switch, messages[:-1])
    opens = text.rpartition(users[-1])[2]
    for step, (user, following) in enumerate(itertools.pairwise(users)):
        before, _, behind = text.partition(user)
        behind = behind.partition(f"RESPONSE {step}.")[2]
        closing = behind.partition(following)[0]
        text = before + user + opens + said[step] + behind
    return text, closing


def play(name, switch, results, closed):
    """A conversation whose responses end with the first tokens of what closes them."""
    tokenizer, build, played = published_tokenizer(name), writer(name, switch), []
    _, closing = expected(name, switch, [shown("A."), shown("B.")], [""])
    end = ids_of(tokenizer, closing)[:closed]
    for said, result in zip(SAID, results, strict=True):
        add_turn(build, played, result, [*letters(tokenizer, said), *end])
    return played


@pytest.mark.parametrize(("name", "switch"), CASES)
def test_a_single_turn_prompt_has_the_ids_of_the_template(name, switch):
    tokenizer, build, result = published_tokenizer(name), writer(name, switch, "tagged"), shown("You see a desk 1.")
    prompt = build.write(result, ())
    whole = written(name, switch, [("user", message(build, result))])
    assert prompt.ids.tolist() == ids_of(tokenizer, whole).tolist()
    assert tokenizer.decode(prompt.ids[: prompt.insert_at]).removesuffix("/nothink").endswith("</action>.")


@pytest.mark.parametrize(("name", "switch", "closed"), CLOSED)
def test_a_conversation_grows_and_reads_as_the_template_writes_it(name, switch, closed):
    tokenizer, results = published_tokenizer(name), [shown(f"You see desk {number}.") for number in (1, 2, 3)]
    played = play(name, switch, results, closed)
    assert tokenizer.decode(played[-1].prompt_ids) == expected(name, switch, results, SAID)[0]
    for turn, later in itertools.pairwise(played):
        continuation(turn, later.prompt_ids)
    # Over the limit, the conversation restarts with the ids of the last turns.
    build = writer_of(tokenizer, "conversation", switch, len(played[2].prompt_ids) - 1, 1)
    first, second, third = user_messages(build, results)
    again = build.write(results[2], played[:2])
    text, head, tail = (tokenizer.decode(ids) for ids in (again.ids, played[0].prompt_ids, played[2].prompt_ids))
    assert again.cut == "history"
    assert text.startswith(head.partition(first)[0])
    assert text.endswith(second + tail.partition(second)[2])
    assert (text.count(TASK), "desk 1." in text, text.count(third)) == (1, False, 1)
    restarted = build.write(results[2], [*played[:1], turn_of(build, again, results[1], played[1].response_ids)])
    assert tokenizer.decode(restarted.ids).count(TASK) == 1


@pytest.mark.parametrize("name", NAMES)
def test_texts_that_spell_control_tokens_stay_text(name):
    tokenizer, switch = published_tokenizer(name), "default"
    whole = expected(name, switch, [shown("A."), shown("B.")], ["C."])[0]
    before, _, behind = whole.partition(message(writer(name, switch), shown("A.")))

    def controls_of(result):
        played = play(name, switch, [result] * 3, 1)
        prompts = [writer(name, switch, "tagged").write(result, played).ids, *(turn.prompt_ids for turn in played)]
        return [controls(tokenizer, ids) for ids in prompts]

    clean = controls_of(shown("A room."))
    for hostile in ("".join(map(str, tokenizer.added_tokens_decoder.values())), behind + "\nlook", before):
        for result in (shown(hostile), shown("A room.", [hostile]), shown("A room.", task=hostile)):
            assert controls_of(result) == clean


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(
    ("name", "switch"), [case for case in CASES if "think" in published_tokenizer(case[0]).chat_template]
)
def test_reasoning_that_the_prompt_opened_belongs_to_the_response(name, switch, special):
    tokenizer = published_tokenizer(name, special)
    build = writer_of(tokenizer, "tagged", switch)
    prompt = build.write(shown("A room."), ())
    opened = tokenizer.decode(prompt.ids).endswith("<think>\n")

    def read(text):
        return build.read(prompt, ids_of(tokenizer, text))

    assert read("so</think><action>Look</action>").valid == opened
    if opened:  # other libraries see the response without its prompt
        for text in ("so</think><action>Look</action>", "so <action>look</action>", "</think><action>look</action> 好"):
            assert project_action(with_opening(text)) == read(text)
    assert read("<think>so</think><action>Look</action>") == Projection("look", True)
    assert not read("so <action>look</action>").valid


@pytest.mark.parametrize("style", ["tagged", "conversation"])
def test_a_template_that_closes_messages_with_text_is_refused(style):
    with pytest.raises(ChatTemplateError, match=r"user's message .*' \[/INST\]'"):
        writer_of(published_tokenizer(TEXTUAL), style)
