"""What saves memory or time changes no result."""

from __future__ import annotations

import pytest
import torch
from small_learners import build_learner, update, weights
from synthetic_groups import synthetic_groups
from torch import nn

from trial_ray.algorithms import GRPOConfig

TRAINING = {"lr": 1e-2, "kl_coeff": 0.01, "minibatch_rows": 16, "microbatch_rows": 8, "max_logprob_gap": 100.0}


@pytest.fixture(scope="module")
def groups():
    return synthetic_groups(vocab_size=400, num_groups=2, group_size=4, seed=11)


def learner_of(model_path: str, **policy):
    config = GRPOConfig().environment("trial/ALFWorld-v0").rl_module(model_path=model_path, **policy)
    return build_learner(config.training(**TRAINING))


def gradients(learner, groups) -> list[torch.Tensor]:
    """Of the first optimizer step."""
    found = []
    learner.apply_gradients = lambda each: found.append([value.clone() for value in each.values()])
    update(learner, groups)
    return found[0]


def test_gradient_checkpointing_gives_the_same_gradients(model_path, groups):
    plain = gradients(learner_of(model_path, model_dtype="float64"), groups)
    learner = learner_of(model_path, model_dtype="float64", gradient_checkpointing=True)
    calls = []
    layer = learner.policy_module.lm.get_decoder().layers[0].mlp
    layer.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    for found, expected in zip(gradients(learner, groups), plain, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    backward_passes = len(calls) - calls.count(False)
    assert backward_passes > 0
    assert backward_passes % 2 == 0  # each forward pass with a gradient is made twice


def test_a_reference_in_the_compute_dtype_scores_as_one_in_full_precision(model_path, groups):
    learner = learner_of(model_path, compute_dtype="bfloat16")
    reference, policy = learner.policy_module.reference, learner.policy_module.lm
    held = [module for module in reference.get_decoder().modules() if isinstance(module, nn.Linear)]
    assert {module.weight.dtype for module in held} == {torch.bfloat16}
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}
    with torch.no_grad(), learner.policy_module.autocast():
        ids = torch.arange(20, 60)[None]
        assert torch.equal(reference(input_ids=ids).logits, policy(input_ids=ids).logits)


def test_the_fused_optimizer_takes_the_steps_of_the_plain_one(model_path, groups, monkeypatch):
    fused = learner_of(model_path)
    assert fused.get_optimizer("default_policy").param_groups[0]["fused"]
    plain_adamw = torch.optim.AdamW
    monkeypatch.setattr(torch.optim, "AdamW", lambda *args, **kwargs: plain_adamw(*args, **{**kwargs, "fused": False}))
    plain = learner_of(model_path)
    for learner in (fused, plain):
        update(learner, groups)
    torch.testing.assert_close(weights(fused), weights(plain), atol=1e-5, rtol=0)
