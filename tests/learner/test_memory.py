"""Savings of memory change no result, and no pass holds more inputs than allowed until its backward pass."""

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
    linear = [module for module in reference.get_decoder().modules() if isinstance(module, nn.Linear)]
    assert {module.weight.dtype for module in linear} == {torch.bfloat16}
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}
    with torch.no_grad(), learner.policy_module.autocast():
        ids = torch.arange(20, 60)[None]
        assert torch.equal(reference(input_ids=ids).logits, policy(input_ids=ids).logits)


class Watched:
    """A module that computes nothing and records the number of inputs of each pass with a gradient."""

    teacher = sharded = None

    def __init__(self, lm):
        self.lm = lm
        self.num_inputs = []

    def forward_train(self, batch):
        packed = batch["sequences"]
        if torch.is_grad_enabled():
            self.num_inputs.append(sum(pack.input_ids.numel() for pack in packed.packs))
        outputs = torch.zeros(2, len(packed.tokens), requires_grad=True)
        return {"logprobs": outputs[0], "entropy": outputs[1]}


@pytest.mark.parametrize("limit", [300, 2000])
@pytest.mark.parametrize("name", ["llama", "mistral"])  # in trees, padded
@pytest.mark.parametrize("method", ["grpo", "trial"])
def test_no_pass_has_more_inputs_than_allowed(name, limit, method):
    config = new_config(method).training(max_tokens_per_forward=limit)
    if method == "trial":
        config.training(hindsight_start_iteration=1)
    rows = group_turn_rows(synthetic_groups(VOCABULARY, num_groups=40, seed=1), config)
    rows.logprobs = rows.hindsight_logprobs = torch.zeros(int(rows.lengths.sum()))
    rows.weights = torch.ones(len(rows))
    lengths = [turn.num_tokens for turn in rows.turns]
    assert max(lengths) < limit < sum(lengths)
    module = Watched(random_model(name))
    passes = MicrobatchPasses(module, config.method_class(config), config, WeightedMeans())
    pieces = np.array_split(np.arange(len(rows)), 3)
    passes.backward(rows, [Microbatch(piece, 0, len(piece) / len(rows)) for piece in pieces], 1)
    assert max(module.num_inputs) <= limit
