"""Distillation's losses and gradients equal those of released code (tests/support/record_distillation.py)."""

import json
from pathlib import Path

import pytest
import torch

from trial_ray import OPDConfig
from trial_ray.learner.loss import microbatch_loss
from trial_ray.learner.rows import TokenBatch
from trial_ray.objectives.divergences import generalised_jsd

RECORD = json.loads((Path(__file__).parents[1] / "data" / "distillation.json").read_text())
PENALTY = 1e-3
"""prime-rl's weight of the squared log-ratio to the sampled policy, which this package leaves out."""


def tensors(case: dict) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in case.items() if isinstance(value, list)}


@pytest.mark.parametrize("case", RECORD["prime_rl"])
def test_reverse_kl_equals_that_of_prime_rl(case):
    given = tensors(case)
    mask, leaf = given["mask"].bool(), given["current"].requires_grad_()
    zeros = torch.zeros(len(mask), dtype=torch.int64)
    tokens = TokenBatch(
        old_logprobs=given["old"],
        advantages=given["old"],  # without an outcome term they have no effect
        mask=mask,
        turn_ids=zeros,
        trajectory_ids=zeros[:1],
        hindsight_logprobs=given["teacher"],
    )
    config = OPDConfig().training(teacher_model="another")
    outputs = {"logprobs": leaf, "entropy": torch.zeros_like(leaf)}
    loss, _ = microbatch_loss(config.method_class(config), config, tokens, outputs, iteration=1)
    drift = PENALTY * (leaf - given["old"])[mask].square().sum()
    total = loss * mask.sum() + drift
    (gradient,) = torch.autograd.grad(total, leaf)
    assert total.item() == pytest.approx(case["loss"], abs=1e-12)
    assert (gradient - given["gradient"]).abs().max() < 1e-12


@pytest.mark.parametrize("case", RECORD["trl"])
def test_divergence_of_distributions_equals_that_of_trl(case):
    given = tensors(case)
    leaf = given["student"].requires_grad_()
    loss = generalised_jsd(leaf, given["teacher"], case["mix"], case["temperature"]).mean()
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert loss.item() == pytest.approx(case["loss"], abs=1e-12)
    assert (gradient - given["gradient"]).abs().max() < 1e-12
