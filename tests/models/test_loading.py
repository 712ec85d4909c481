"""Weights are read tensor by tensor; folders without weights, quantised weights and code in folders are refused."""

import json
import weakref
from functools import partial

import pytest
import torch
from architectures import config_of, save_model
from rejections import misconfigured
from transformers import AutoTokenizer

from trial_ray.engines.settings import check_positions
from trial_ray.errors import TrialRayError
from trial_ray.models.loading import fill, load_causal_lm, load_tokenizer
from trial_ray.models.model_shape import model_shape, stop_token_ids
from trial_ray.warmstart.policy import load_policy
from trial_ray.warmstart.settings import WarmStartSettings

CPU = torch.device("cpu")
load_whole = partial(load_causal_lm, dtype="float32")
load_empty = partial(load_whole, weights=False)


def test_host_memory_has_one_tensor_at_a_time(tmp_path, monkeypatch):
    folder = save_model("qwen2", tmp_path)
    alive, counts = [], []

    def copy_whole(whole, into):
        alive.append(weakref.ref(whole))
        counts.append(sum(tensor() is not None for tensor in alive))
        into.copy_(whole)

    monkeypatch.setattr("trial_ray.models.sharding.copy_whole", copy_whole)
    lm = load_empty(folder)
    fill(lm, folder, CPU)
    assert len(alive) == len(list(lm.parameters()))
    assert max(counts) <= 2  # the copied tensor, and the previous one until its variable is rebound


def test_a_folder_without_weights_is_refused(model_path, tmp_path):
    AutoTokenizer.from_pretrained(model_path).save_pretrained(tmp_path)
    config_of("llama").save_pretrained(tmp_path)
    for load in (load_whole, lambda folder: fill(load_empty(folder), folder, CPU)):
        misconfigured("No causal LM could be loaded", load, str(tmp_path))


def test_quantised_weights_are_refused(tmp_path):
    config = config_of("llama")
    config.quantization_config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config.save_pretrained(tmp_path)
    for load in (load_whole, load_empty):
        misconfigured("quantised", load, str(tmp_path))


LOADERS = {
    "tokenizer": load_tokenizer,
    "model": load_whole,
    "empty model": load_empty,
    "shape": model_shape,
    "positions": lambda folder: check_positions(folder, 1),
    "stop tokens": stop_token_ids,
    "warm start": lambda folder: load_policy(WarmStartSettings(model_path=folder), None),
}


@pytest.mark.parametrize("name", LOADERS)
def test_code_in_a_models_folder_is_never_run(name, tmp_path, monkeypatch):
    """On a terminal, transformers would ask; the answer "y" would run the code."""
    (tmp_path / "theirs.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nConfig = Model = Tokenizer = dict\n")
    auto = {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "theirs", "auto_map": auto}))
    tokenizer = {"tokenizer_class": "Tokenizer", "auto_map": {"AutoTokenizer": ["theirs.Tokenizer", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    monkeypatch.setattr("builtins.input", lambda *prompt: "y")
    with pytest.raises((TrialRayError, ValueError), match="custom code"):
        LOADERS[name](str(tmp_path))
    assert not (tmp_path / "ran").exists()
