"""Tokens of the action, for tokenizers that split tags and action in different ways."""

import copy

import numpy as np
from chat_tokenizers import chat_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from prompt_games import ids_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AddedToken, PreTrainedTokenizerFast

from trial_envs.core.projection import project_action
from trial_ray.learner.scoring import action_mask
from trial_ray.trajectory import Turn


def parted_text(tokenizer, ids):
    """Return the text of the tokens before the mask, in it and after it; ``None`` if the mask is empty."""
    places = action_mask([Turn(response_ids=ids)], tokenizer).nonzero().flatten().tolist()
    if not places:
        return None
    assert places == [*range(places[0], places[-1] + 1)]
    return [tokenizer.decode(part) for part in np.split(ids, [places[0], places[-1] + 1])]


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
    assert parted_text(tokenizer, ids) == ["<acti", "on>look</", "action>x"]


def test_all_bytes_of_the_first_and_last_character_count():
    """The mask of a response without an action follows."""
    tokenizer, encode = merging_tokenizer("<action>", "</action>")
    ids = encode("🍎", "<action>", "取る", "</action>", "é")
    mask = action_mask([Turn(response_ids=ids), Turn(response_ids=ids[:3])], tokenizer)
    begin = len("🍎".encode()) + 1
    assert len(mask) == len(ids) + 3
    assert mask.nonzero().flatten().tolist() == [*range(begin, begin + len("取る".encode()))]


def test_a_plain_response_is_the_action_without_its_stop_token():
    """Only the generation settings name Gemma's <end_of_turn>."""
    tokenizer = copy.deepcopy(chat_tokenizer("qwen3"))
    tokenizer.add_tokens([AddedToken("<end_of_turn>", special=True)])
    words = ids_of(tokenizer, "go to shelf 1")
    stops = tokenizer.convert_tokens_to_ids([tokenizer.eos_token, "<end_of_turn>"])
    turns = [Turn(response_ids=np.append(words, stop)) for stop in stops]
    assert action_mask(turns, tokenizer, "plain").tolist() == ([True] * len(words) + [False]) * 2


pieces = st.lists(
    st.sampled_from(["<action>", "</action>", "<ACTION>", "look", " 🍎", "\n", "é", "<", "action>", "<think>", "x"]),
    max_size=8,
)


@given(pieces, st.sampled_from(["qwen3", "tiny"]))
def test_the_mask_covers_the_action_of_the_projection(pieces, model):
    tokenizer = chat_tokenizer(model)
    response = "".join(pieces)
    parts = parted_text(tokenizer, ids_of(tokenizer, response))
    lowered = response.lower()
    start, end = lowered.find("<action>"), lowered.find("</action>")
    if start < 0 or start + len("<action>") >= end:
        assert parts is None
        return
    inside, action = parts[1].lower(), project_action(response).action
    assert action in inside
    # The first and last token may contain neighbouring characters, but never a whole tag.
    for tag in ("<action>", "</action>"):
        assert inside.count(tag) == action.count(tag)
