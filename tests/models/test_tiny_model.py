"""The tiny model and its tokenizer: exact round trips, the same ids everywhere, loadable folders."""

import hashlib
import json
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from nano_model import save_nano_model
from transformers import AutoModelForCausalLM

from trial_ray.models.tiny import build_tiny_model


@given(st.text(max_size=60))
def test_any_text_comes_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text, split_special_tokens=True)) == text


def test_ids_are_the_same_on_every_machine(tokenizer):
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]))
    known = Path(__file__).with_name("tiny_vocabulary.sha256").read_text(encoding="utf-8").strip()
    assert hashlib.sha256(vocabulary.encode()).hexdigest() == known


def test_a_saved_model_is_of_float32_and_stops_at_the_end_token(tmp_path, tokenizer):
    loaded = AutoModelForCausalLM.from_pretrained(save_nano_model(tmp_path))
    assert loaded.dtype == torch.float32
    assert loaded.generation_config.eos_token_id == tokenizer.eos_token_id


def test_seed_determines_weights_and_keeps_the_global_generator(tokenizer):
    before = torch.random.get_rng_state()
    first, same, other = (build_tiny_model(tokenizer, "nano", seed).lm_head.weight for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
