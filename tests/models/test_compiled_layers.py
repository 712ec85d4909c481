"""Compiled decoder layers compute what plain ones do: values and gradients, with checkpointing, over both kinds of masks."""

import copy

import numpy as np
import pytest
import torch
from architectures import VOCABULARY, config_of
from transformers import AutoModelForCausalLM

from trial_ray.models import logprobs, module, tree_attention
from trial_ray.models.logprobs import sequence_logprobs
from trial_ray.models.prefix_tree import PrefixOrder, ScoredSequence, pack_trees
from trial_ray.models.tree_attention import FLEX_BLOCK, tree_block_mask

TOKENS = 2048


@pytest.fixture(scope="module")
def lm():
    torch.manual_seed(0)
    config = config_of("qwen3")
    config.head_dim, config.tie_word_embeddings = 16, True
    return AutoModelForCausalLM.from_config(config, attn_implementation=tree_attention.register()).eval()


def packed(max_tokens, device="cpu"):
    """Eight rows that share a beginning, ``max_tokens`` tokens together."""
    generator = np.random.default_rng(max_tokens)
    first = generator.integers(0, VOCABULARY, 100)
    length = (max_tokens - 100) // 8 + 1
    rows = [ScoredSequence(np.concatenate((first, generator.integers(0, VOCABULARY, length))), 20) for _ in range(8)]
    return pack_trees(PrefixOrder(rows), max_tokens, device, FLEX_BLOCK)


@pytest.fixture
def compiled(lm, monkeypatch):
    """The same weights in compiled layers; the backend runs the traced operations one by one."""
    monkeypatch.setattr(module, "COMPILE_BACKEND", "aot_eager")
    torch._dynamo.reset()
    changed = copy.deepcopy(lm)
    module.compile_layers(changed)
    yield changed
    torch._dynamo.reset()


@pytest.mark.parametrize("checkpointing", [pytest.param(False, marks=pytest.mark.long), True])
def test_values_and_gradients_are_those_of_plain_layers(lm, compiled, checkpointing):
    models = compiled, copy.deepcopy(lm)
    if checkpointing:
        for model in models:
            module.checkpoint_layers(model)
    for max_tokens in (300, 500):  # packs of other lengths are not compiled again
        sequences = packed(max_tokens)
        scores, expected = (sequence_logprobs(model, sequences) for model in models)
        torch.testing.assert_close(scores, expected, atol=1e-5, rtol=0)
        gradients, expected_gradients = (
            torch.autograd.grad(values.sum(), model.parameters())
            for values, model in zip((scores, expected), models, strict=True)
        )
        torch.testing.assert_close(gradients, expected_gradients, atol=1e-3, rtol=1e-4)
    code = type(compiled.model.layers[0]).forward.__code__
    assert len(torch._dynamo.eval_frame._debug_get_cache_entry_list(code)) <= 1 + checkpointing


@pytest.mark.long
@torch.no_grad()
def test_flex_attention_in_compiled_layers_scores_as_sdpa_does(lm, compiled, monkeypatch):
    sequences = packed(TOKENS)
    expected = sequence_logprobs(lm, sequences)
    monkeypatch.setattr(logprobs, "attention_inputs", lambda _, exits: {"attention_mask": tree_block_mask(exits)})
    scores = sequence_logprobs(compiled, sequences)
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("whole_layers", [False, True])
def test_flex_attention_through_a_model_on_a_gpu_equals_sdpa_on_the_cpu(lm, checkpointing, whole_layers):
    expected_lm, found_lm = copy.deepcopy(lm), copy.deepcopy(lm).to("cuda")
    if checkpointing:
        module.checkpoint_layers(found_lm)
    if whole_layers:
        module.compile_layers(found_lm)
    expected = sequence_logprobs(expected_lm, packed(TOKENS))
    with torch.autocast("cuda", torch.bfloat16):
        scores = sequence_logprobs(found_lm, packed(TOKENS, "cuda"))
    torch.testing.assert_close(scores.cpu(), expected, atol=0.05, rtol=0)
    (expected.sum() + scores.sum().cpu()).backward()
    for ours, theirs in zip(found_lm.parameters(), expected_lm.parameters(), strict=True):
        assert (ours.grad.cpu() - theirs.grad).norm() < 0.05 * theirs.grad.norm()
