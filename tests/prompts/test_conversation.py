"""Conversations over the limit, their texts, and stop tokens; test_published_templates compares the written text."""

import pytest
from chat_tokenizers import chat_tokenizer
from prompt_games import TASK, add_turn, letters, message, shown, writer_of

from trial_ray.adapters import alfworld, external, search_qa, webshop
from trial_ray.errors import ChatTemplateError

QWEN = chat_tokenizer("qwen3")


@pytest.mark.parametrize(("window", "kept"), [(0, 0), (2, 2), (50, 5)])
def test_a_conversation_over_the_limit_restarts_with_its_last_turns(window, kept):
    def episode(limit):
        build, played = writer_of(QWEN, "conversation", limit=limit, window=window), []
        for step in range(1, 8):
            response = [*letters(QWEN, f"<action>{step}</action>"), QWEN.eos_token_id]
            add_turn(build, played, shown(f"ROOM{step} " + "desk " * 20), response)
        return played

    played = episode(len(episode(100_000)[-1].prompt_ids) - 1)
    assert [turn.prompt_cut for turn in played] == ["none"] * 6 + ["history"]
    text = QWEN.decode(played[-1].prompt_ids)
    assert [step for step in range(1, 8) if f"ROOM{step}" in text] == list(range(7 - kept, 8))
    assert [step for step in range(1, 8) if f"<action>{step}<" in text] == list(range(7 - kept, 7))


@pytest.mark.parametrize("adapter", [alfworld.ADAPTER, webshop.ADAPTER, search_qa.ADAPTER, external.TEXTWORLD])
def test_a_conversation_shows_the_texts_of_the_tagged_template(adapter):
    conversation, tagged = (writer_of(QWEN, style, adapter=adapter) for style in ("conversation", "tagged"))
    result = shown("Instruction: [SEP] a lamp [SEP] You see a desk 1.", ["go to desk 1", "help", "look"])
    template, text = conversation.template, message(conversation, result, 3)
    assert template.system(TASK).startswith(tagged.template.role)
    assert f"Your task: {TASK}" in template.system(TASK)
    assert text in message(tagged, result, 3)
    assert ("help" in text) == (adapter is not alfworld.ADAPTER)
    for response in ("x" * 99, "<think>so</think><action>look</action>"):
        assert template.project(response) == tagged.template.project(response)


def test_a_model_must_stop_at_the_templates_end_of_a_response():
    build = writer_of(QWEN, "conversation")
    build.require_end([QWEN.pad_token_id, QWEN.eos_token_id])
    with pytest.raises(ChatTemplateError, match=rf"im_end.*endoftext.*{QWEN.eos_token_id}"):
        build.require_end([QWEN.pad_token_id])
