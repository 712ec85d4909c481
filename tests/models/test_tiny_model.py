"""The tiny model and its tokenizer: whole words, exact round trips, the same ids everywhere, loadable folders."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nano_model import save_nano_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from trial_envs.alfworld.household import CONTAINS, LAMPS, ROOMS
from trial_ray.environments.alfworld import ADAPTER, VERBS
from trial_ray.errors import ConfigError
from trial_ray.models.tiny import SHAPES, build_tiny_model, build_tokenizer

VLLM_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(ADAPTER.warm_start.vocabulary)


def test_every_type_and_verb_is_one_token(tokenizer):
    types = {*CONTAINS, *LAMPS, *(kind for kinds in CONTAINS.values() for kind in kinds)}
    types |= {kind for room in ROOMS for kind in (*room.objects, *room.receptacles)}
    words = sorted(kind.lower() for kind in types) + VERBS.split()
    split = [word for word in words if len(tokenizer.encode(word)) != 1 or len(tokenizer.encode(f" {word}")) != 1]
    assert split == []


def test_a_numbered_name_costs_two_tokens_and_the_number_is_shared(tokenizer):
    cabinet, shelf = tokenizer.encode(" cabinet 12"), tokenizer.encode(" shelf 12")
    assert len(cabinet) == len(shelf) == 2
    assert cabinet[1] == shelf[1]


def test_marks_do_not_change_the_name_before_them(tokenizer):
    assert tokenizer.encode(" sidetable 1.")[:2] == tokenizer.encode(" sidetable 1")


@given(st.text(max_size=60))
def test_any_text_comes_back(text):
    tokenizer = build_tokenizer(ADAPTER.warm_start.vocabulary)
    assert tokenizer.decode(tokenizer.encode(text, split_special_tokens=True)) == text


def test_ids_are_the_same_on_every_machine(tokenizer):
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]))
    known = Path(__file__).with_name("tiny_vocabulary.sha256").read_text(encoding="utf-8").strip()
    assert hashlib.sha256(vocabulary.encode()).hexdigest() == known


def test_frequent_words_of_other_texts_become_tokens_without_moving_the_known_ids(tokenizer):
    texts = ["buy zebra shoes", "zebra shoes cheap", "zebra"]
    larger = build_tokenizer(ADAPTER.warm_start.vocabulary, texts, most_words=1)
    assert len(larger.encode(" zebra")) > 1  # " shoes" is more frequent than " zebra", which mostly opens a text
    assert len(larger.encode(" shoes")) == 1
    assert larger.get_vocab().items() >= tokenizer.get_vocab().items()


def test_without_a_vocabulary_the_words_of_prompts_are_tokens_all_the_same():
    bare = build_tokenizer()
    assert [len(bare.encode(word)) for word in ("actions", " history", " 12", "...")] == [1] * 4
    assert len(bare.encode("cabinet")) == len("cabinet")


def test_a_saved_model_gives_the_same_logits_after_loading(tmp_path, tokenizer):
    folder = save_nano_model(tmp_path / "model", seed=3)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    again = AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([again.encode("take mug 1 from shelf 1")])
    assert ids.tolist() == [tokenizer.encode("take mug 1 from shelf 1")]
    with torch.no_grad():
        expected = build_tiny_model(tokenizer, "nano", seed=3)(ids).logits
        torch.testing.assert_close(loaded(ids).logits, expected)
    assert loaded.dtype == torch.float32
    assert loaded.generation_config.eos_token_id == again.eos_token_id
    assert again.chat_template == tokenizer.chat_template


def test_seed_decides_the_weights_and_leaves_the_callers_generator_alone(tokenizer):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, same, other = (build_tiny_model(tokenizer, "nano", seed).lm_head.weight for seed in (0, 0, 1))
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_the_default_is_small_and_fits_the_cpu_engine(tokenizer):
    model = build_tiny_model(tokenizer)
    assert sum(parameter.numel() for parameter in model.parameters()) < 1_000_000
    assert all(shape.head_dim in VLLM_CPU_HEAD_SIZES for shape in SHAPES.values())


def test_an_unknown_size_names_the_known_ones(tokenizer):
    with pytest.raises(ConfigError, match="nano, mini, tiny, small"):
        build_tiny_model(tokenizer, "huge")
