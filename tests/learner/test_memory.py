"""What saves memory or time changes no result, and no forward pass holds more than allowed until its backward pass."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from architectures import VOCABULARY, random_model
from small_learners import learner_of
from synthetic_groups import synthetic_groups
from torch import nn

from trial_ray.algorithms.methods import new_config
from trial_ray.learner.loss import WeightedMeans
from trial_ray.learner.passes import MicrobatchPasses
from trial_ray.learner.rows import group_turn_rows
from trial_ray.learner.update_plan import Microbatch

TRAINING = {"lr": 1e-2, "ref_kl_coeff": 0.01, "minibatch_rows": 16, "microbatch_rows": 8}


def test_a_reference_in_the_compute_dtype_scores_as_one_in_full_precision(model_path):
    learner = learner_of("grpo", model_path, **TRAINING, compute_dtype="bfloat16", gradient_checkpointing=True)
    assert learner.policy_module.lm.is_gradient_checkpointing
    reference, policy = learner.policy_module.reference, learner.policy_module.lm
    assert learner.get_optimizer("default_policy").param_groups[0]["fused"]
    held = [module for module in reference.get_decoder().modules() if isinstance(module, nn.Linear)]
    assert {module.weight.dtype for module in held} == {torch.bfloat16}
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}
    with torch.no_grad(), learner.policy_module.autocast():
        ids = torch.arange(20, 60)[None]
        assert torch.equal(reference(input_ids=ids).logits, policy(input_ids=ids).logits)


class Watched:
    """A module that computes nothing and notes how many inputs each pass with a gradient has."""

    teacher = sharded = None

    def __init__(self, lm):
        self.lm = lm
        self.held = []

    def forward_train(self, batch):
        packed = batch["sequences"]
        if torch.is_grad_enabled():
            self.held.append(sum(pack.input_ids.numel() for pack in packed.packs))
        outputs = torch.zeros(2, len(packed.tokens), requires_grad=True)
        return {"logprobs": outputs[0], "entropy": outputs[1]}


def passes_of(module, method, groups, **training):
    """Scored rows of the groups, and the passes over them."""
    config = new_config(method).training(**({"hindsight_start_iteration": 1} if method == "trial" else {}), **training)
    rows = group_turn_rows(groups, config)
    rows.logprobs = rows.hindsight_logprobs = torch.zeros(int(rows.lengths.sum()))
    rows.weights = torch.ones(len(rows))
    return rows, MicrobatchPasses(module, config.method_class(config), config, WeightedMeans())


@pytest.mark.parametrize("limit", [300, 2000])
@pytest.mark.parametrize("name", ["llama", "mistral"])  # in trees, padded
@pytest.mark.parametrize("method", ["grpo", "trial"])
def test_no_pass_holds_more_inputs_than_allowed(name, limit, method):
    groups = synthetic_groups(vocab_size=VOCABULARY, num_groups=40, group_size=4, seed=1)
    module = Watched(random_model(name))
    rows, passes = passes_of(module, method, groups, max_tokens_per_forward=limit)
    pieces = np.array_split(np.arange(len(rows)), 3)
    passes.backward(rows, [Microbatch(piece, 0, len(piece) / len(rows)) for piece in pieces], 1)
    longest = max(turn.num_tokens for turn in rows.turns)
    assert sum(turn.num_tokens for turn in rows.turns) > limit, "else there is nothing to cut"
    assert longest < limit
    assert max(module.held) <= limit
