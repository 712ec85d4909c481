"""Parameters, and the buffers that are stored with them, are saved, loaded and sent."""

from functools import partial

import pytest
import torch
from architectures import random_model, randomise, save_model
from small_learners import config_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from trial_ray.engines.transformers import TransformersEngine
from trial_ray.engines.weights import pack_weights, weights_checksum
from trial_ray.errors import CheckpointError, ConfigError
from trial_ray.models.folders import require_same_config, write_model
from trial_ray.models.loading import fill, load_causal_lm
from trial_ray.models.lora import Adapter
from trial_ray.models.tensors import engine_tensors, from_arrays, stored_tensors, to_arrays

close = partial(torch.testing.assert_close, atol=1e-5, rtol=0)


@torch.no_grad()
def logits_of(lm):
    return lm(input_ids=torch.arange(3, 27).view(2, 12), use_cache=False).logits


@pytest.mark.parametrize(
    "name",  # one architecture for each kind of tensors
    ["llama", "gpt2", "gpt-oss", "gemma4", "glm4-moe", "deepseek-v3", "falcon-h1", "apertus", "lfm2-moe", "minimax-m2", "rwkv"],
)  # fmt: skip
def test_a_written_model_is_loaded_and_sent_as_transformers_loads_it(name, tmp_path):
    lm = random_model(name)
    lm.generation_config.eos_token_id = [2, 5]
    write_model(lm, stored_tensors(lm).items(), tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    require_same_config(lm.config, tmp_path)
    try:
        filled = load_causal_lm(str(tmp_path), "float32", weights=False)
        assert all(tensor.is_meta for tensor in filled.parameters())
        fill(filled, str(tmp_path), torch.device("cpu"))
    except ConfigError:  # by name, because it could not be scored
        filled = loaded
    tensors, expected = (dict([*lm.named_parameters(), *lm.named_buffers()]) for lm in (filled, loaded))
    close(tensors, expected, atol=0)
    for found in (loaded, filled):
        close(logits_of(found), logits_of(lm))
    assert filled.generation_config.eos_token_id == [2, 5]
    assert not filled.training
    # A bfloat16 engine loads the same parameters as the learner sends.
    parameters = dict(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).named_parameters())
    sent = ((name, tensor) for name, tensor in engine_tensors(lm, torch.bfloat16) if name in parameters)
    assert weights_checksum(parameters.items()) == weights_checksum(sent)


def test_states_hold_bfloat16_exactly():
    tensors = {"half": torch.tensor([1.5, -0.1], dtype=torch.bfloat16), "whole": torch.tensor([0.1])}
    again = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    from_arrays(to_arrays(tensors), again)
    close(again, tensors, atol=0)


@pytest.fixture(scope="module")
def expert_path(tmp_path_factory, model_path):
    """Experts that a stored buffer chooses, with a tokenizer."""
    folder = tmp_path_factory.mktemp("experts")
    AutoTokenizer.from_pretrained(model_path).save_pretrained(folder)
    return save_model("deepseek-v3", folder)


@pytest.mark.actors
def test_checkpoints_and_engines_hold_the_buffers_of_the_policy(expert_path, ray_session, tmp_path):
    spec = config_of("grpo", expert_path).get_rl_module_spec()
    module, again = spec.build(), spec.build()
    module.load(torch.device("cpu"), sharded=False)
    randomise(module.lm, seed=1)
    expected = logits_of(module.lm)
    module.save_to_path(tmp_path)
    again.restore_from_path(tmp_path)
    assert torch.equal(logits_of(again.lm), expected)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    close(logits_of(exported), expected)
    engine = TransformersEngine(expert_path, max_model_len=64)
    engine._open()
    shards = pack_weights(module.named_weights(torch.float32), 2)
    assert engine._replace_weights(shards) == (shards.checksum, shards.arrangement)
    close(logits_of(engine._model), expected)


def test_fused_experts_have_no_adapters(expert_path):
    lm = load_causal_lm(expert_path, "float32", weights=False)
    with pytest.raises(ConfigError, match=r"'down_proj'.* name fused experts .*'q_a_proj'"):
        Adapter(lm, rank=2, alpha=4.0, targets=None, dtype=torch.float32, seed=0)


@pytest.mark.parametrize("state", [{}, {"a": [0.0, 0.0], "b": [0.0]}, {"a": [0.0]}])
def test_the_state_of_another_model_changes_nothing(state):
    tensors = {"a": torch.ones(2)}
    with pytest.raises(CheckpointError):
        from_arrays(state, tensors)
    assert tensors["a"].tolist() == [1, 1]
