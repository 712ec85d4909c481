"""Tokens of the action, for tokenizers that split tags and action in different ways."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from chat_tokenizers import chat_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AddedToken, PreTrainedTokenizerFast

from trial_envs.core.projection import project_action
from trial_ray.learner.scoring import action_mask
from trial_ray.trajectory import Turn

TOKENIZERS = ("qwen3", "tiny")


def ids_of(tokenizer, text):
    return np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)


def masked_text(tokenizer, ids, **kwargs):
    """Return the text of the tokens in the mask, before them and after them; ``None`` if the mask is empty."""
    mask = action_mask([Turn(response_ids=ids)], tokenizer, **kwargs).numpy()
    places = mask.nonzero()[0]
    if not len(places):
        return None
    first, last = places[0], places[-1]
    assert mask[first : last + 1].all()
    return tuple(tokenizer.decode(part) for part in (ids[first : last + 1], ids[:first], ids[last + 1 :]))


def merging_tokenizer(*merged):
    """Return a tokenizer of bytes in which each given piece is one token, and a function that encodes pieces."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    spell = lambda text: pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(text)[0][0]  # noqa: E731
    vocabulary = {token: index for index, token in enumerate([*alphabet, *map(spell, merged)])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    core.decoder = decoders.ByteLevel()

    def encode(*pieces):
        parts = [[piece] if piece in vocabulary else piece for piece in map(spell, pieces)]
        return np.array([vocabulary[token] for part in parts for token in part], np.int32)

    return PreTrainedTokenizerFast(tokenizer_object=core), encode


def test_a_token_shared_with_a_tag_is_part_of_the_action():
    tokenizer, encode = merging_tokenizer("on>lo", "ok</", "<action>", "x")
    ids = encode("<acti", "on>lo", "ok</", "action>", "x")
    assert masked_text(tokenizer, ids) == ("on>look</", "<acti", "action>x")


@pytest.mark.parametrize("action", ["go 🍎", "取る"])
def test_all_bytes_of_the_first_and_last_character_count(action):
    tokenizer, encode = merging_tokenizer("<action>", "</action>")
    ids = encode("🍎", "<action>", action, "</action>", "é")
    mask = action_mask([Turn(response_ids=ids)], tokenizer)
    begin = len("🍎".encode()) + 1
    assert mask.nonzero().squeeze(1).tolist() == list(range(begin, begin + len(action.encode())))


def test_masks_of_responses_are_concatenated():
    tokenizer = chat_tokenizer("qwen3")
    responses = [ids_of(tokenizer, text) for text in ("<action>look</action>", "none", "<action>inventory</action>")]
    parts = [action_mask([Turn(response_ids=ids)], tokenizer) for ids in responses]
    whole = action_mask([Turn(response_ids=ids) for ids in responses], tokenizer)
    assert whole.tolist() == [value for part in parts for value in part.tolist()]
    assert not parts[1].any()


def test_a_plain_response_is_the_action_without_its_stop_token():
    """Only the generation settings name Gemma's <end_of_turn>."""
    tokenizer = copy.deepcopy(chat_tokenizer("qwen3"))
    tokenizer.add_tokens([AddedToken("<end_of_turn>", special=True)])
    words = ids_of(tokenizer, "go to shelf 1")
    for stop in (tokenizer.eos_token, "<end_of_turn>"):
        ids = [*words, tokenizer.convert_tokens_to_ids(stop)]
        assert action_mask([Turn(response_ids=np.array(ids))], tokenizer, "plain").tolist() == [True] * len(words) + [
            False
        ]


pieces = st.lists(
    st.sampled_from(["<action>", "</action>", "<ACTION>", "look", " 🍎", "\n", "é", "<", "action>", "<think>", "x"]),
    max_size=8,
)


@given(pieces, st.sampled_from(TOKENIZERS))
def test_the_mask_covers_the_action_of_the_projection(parts, model):
    tokenizer = chat_tokenizer(model)
    response = "".join(parts)
    masked = masked_text(tokenizer, ids_of(tokenizer, response))
    lowered = response.lower()
    start, end = lowered.find("<action>"), lowered.find("</action>")
    if start < 0 or end < 0 or start + len("<action>") >= end:
        assert masked is None
        return
    inside, action = masked[0].lower(), project_action(response).action
    assert action in inside
    # The first and last token may contain neighbouring characters, but never a whole tag.
    for tag in ("<action>", "</action>"):
        assert inside.count(tag) == action.count(tag)
