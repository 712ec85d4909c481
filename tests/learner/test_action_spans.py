"""Which tokens count as the action, for tokenizers that cut the tags and the action in different ways."""

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
from trial_ray.learner.rows import action_mask

TOKENIZERS = ("qwen2.5", "qwen3", "tiny")


def ids_of(tokenizer, text):
    return np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)


def masked_text(tokenizer, ids, **kwargs):
    """Text of the tokens in the mask, and text of what stands before and behind them."""
    mask = action_mask([ids], tokenizer, **kwargs).numpy()
    places = mask.nonzero()[0]
    if not len(places):
        return None
    first, last = places[0], places[-1]
    assert mask[first : last + 1].all()
    return tuple(tokenizer.decode(part) for part in (ids[first : last + 1], ids[:first], ids[last + 1 :]))


def merging_tokenizer(*merged):
    """Bytes, and the given pieces as one token each."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    spell = lambda text: pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(text)[0][0]  # noqa: E731
    vocabulary = {token: index for index, token in enumerate([*alphabet, *map(spell, merged)])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    encode = lambda *pieces: np.array(  # noqa: E731
        [index for piece in pieces for index in _piece_ids(vocabulary, spell(piece))], np.int32
    )
    return tokenizer, encode


def _piece_ids(vocabulary, spelt):
    return [vocabulary[spelt]] if spelt in vocabulary else [vocabulary[letter] for letter in spelt]


def test_a_token_that_an_action_shares_with_a_tag_counts():
    tokenizer, encode = merging_tokenizer("on>lo", "ok</", "<action>", "x")
    ids = encode("<acti", "on>lo", "ok</", "action>", "x")
    inside, before, behind = masked_text(tokenizer, ids)
    assert (inside, before, behind) == ("on>look</", "<acti", "action>x")


@pytest.mark.parametrize("action", ["é", "🍎", "go 🍎", "🍎🍏", "取る"])
def test_every_byte_of_the_first_and_last_character_counts(action):
    tokenizer, encode = merging_tokenizer("<action>", "</action>")
    ids = encode("🍎", "<action>", action, "</action>", "é")
    mask = action_mask([ids], tokenizer)
    begin = len("🍎".encode()) + 1
    assert mask.nonzero().squeeze(1).tolist() == list(range(begin, begin + len(action.encode())))


def test_responses_lie_end_to_end():
    tokenizer = chat_tokenizer("qwen3")
    responses = [ids_of(tokenizer, text) for text in ("<action>look</action>", "none", "<action>inventory</action>")]
    parts = [action_mask([ids], tokenizer) for ids in responses]
    whole = action_mask(responses, tokenizer)
    assert whole.tolist() == [value for part in parts for value in part.tolist()]
    assert not parts[1].any()


@pytest.mark.parametrize("model", TOKENIZERS)
def test_a_plain_response_is_the_action_without_its_stop_token(model):
    tokenizer = chat_tokenizer(model)
    words = ids_of(tokenizer, "go to shelf 1")
    ids = np.append(words, tokenizer.eos_token_id)
    assert action_mask([ids], tokenizer, "plain").tolist() == [True] * len(words) + [False]
    assert not action_mask([ids], tokenizer, "tagged").any()


def test_a_stop_token_without_a_role_in_the_tokenizer_is_no_action():
    """As Gemma's <end_of_turn>, which only the model's generation settings name."""
    tokenizer = copy.deepcopy(chat_tokenizer("qwen3"))
    tokenizer.add_tokens([AddedToken("<end_of_turn>", special=True)])
    words = ids_of(tokenizer, "look<end_of_turn>")
    assert action_mask([words], tokenizer, "plain").tolist() == [True] * (len(words) - 1) + [False]


pieces = st.lists(
    st.sampled_from(["<action>", "</action>", "<ACTION>", "look", " 🍎", "\n", "é", "<", "action>", "<think>", "x"]),
    max_size=8,
)


@given(pieces, st.sampled_from(TOKENIZERS))
def test_the_mask_holds_the_action_that_the_projection_reads(parts, model):
    tokenizer = chat_tokenizer(model)
    response = "".join(parts)
    found = masked_text(tokenizer, ids_of(tokenizer, response))
    lowered = response.lower()
    start, end = lowered.find("<action>"), lowered.find("</action>")
    if start < 0 or end < 0 or start + len("<action>") >= end:
        assert found is None
        return
    inside, action = found[0].lower(), project_action(response).action
    assert action in inside
    # A neighbour may share the first or the last token, a whole tag never.
    assert [inside.count(tag) for tag in ("<action>", "</action>")] == [
        action.count("<action>"),
        action.count("</action>"),
    ]
