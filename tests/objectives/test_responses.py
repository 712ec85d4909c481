"""Surrogates of whole responses, GSPO's ratio and Dr. GRPO's mean, against loops over ragged turns."""

import math

import objective_reference as reference
import pytest
import torch
from hypothesis import assume, given, settings

from trial_ray.objectives.choices import RATIO_LEVELS, SURROGATE_MEANS
from trial_ray.objectives.losses import clipped_losses, clipped_surrogate
from trial_ray.objectives.responses import sequence_log_ratios, surrogate_mean

LENGTH = 7


def product(columns, logprobs, ratio_level, mean, **clips):
    unit = (columns["turn_ids"], columns["num_turns"])
    log_ratio = logprobs - columns["old"]
    if ratio_level == "sequence":
        log_ratio = sequence_log_ratios(log_ratio, columns["mask"], *unit)
    losses = clipped_losses(log_ratio, columns["advantage"], columns["mask"], **clips)
    return surrogate_mean(losses, columns["mask"], *unit, mean, LENGTH)


def smooth(batch):
    """Central differences are no gradient where the surrogate has a corner."""
    ratios = [math.exp(t.logp - t.old) for t in reference.tokens_of(batch)]
    for trajectory in batch:
        for turn in trajectory:
            logs = [t.logp - t.old for t in turn if t.m]
            ratios += [math.exp(math.fsum(logs) / len(logs))] if logs else []
    return all(abs(ratio - edge) > 1e-4 for ratio in ratios for edge in (0.8, 1.2, 3.0))


@pytest.mark.parametrize("dual", [None, 3.0])
@pytest.mark.parametrize("mean", SURROGATE_MEANS)
@pytest.mark.parametrize("ratio_level", RATIO_LEVELS)
@settings(max_examples=25)
@given(batch=reference.batches)
def test_value_and_gradient_equal_the_loop(ratio_level, mean, dual, batch):
    assume(smooth(batch))
    columns = reference.flat(batch)
    logprobs = columns["logp"].clone().requires_grad_()
    loss = product(columns, logprobs, ratio_level, mean, dual_clip=dual)
    function = lambda logps: reference.response_surrogate(batch, logps, ratio_level, mean, LENGTH, dual=dual)  # noqa: E731
    assert loss.item() == pytest.approx(function(logprobs.tolist()), abs=1e-12)
    numeric = reference.numeric_gradient(function, logprobs.tolist())
    assert torch.autograd.grad(loss, logprobs)[0].tolist() == pytest.approx(numeric, abs=1e-5, rel=1e-5)


@given(batch=reference.batches)
def test_token_ratios_and_the_token_mean_are_the_clipped_surrogate(batch):
    columns = reference.flat(batch)
    arguments = (columns["logp"], columns["old"], columns["advantage"], columns["mask"])
    assert torch.equal(product(columns, columns["logp"], "token", "tokens"), clipped_surrogate(*arguments))


def test_the_ratio_of_a_response_is_the_geometric_mean_of_its_eligible_tokens():
    log_ratio = torch.tensor([0.3, 0.1, 9.0, -0.4], dtype=torch.float64)
    mask, turns = torch.tensor([True, True, False, True]), torch.tensor([0, 0, 0, 2])
    assert sequence_log_ratios(log_ratio, mask, turns, 4).tolist() == pytest.approx([0.2, 0.2, 0.2, -0.4])


def test_an_empty_mask_is_zero_with_a_graph():
    for mean in SURROGATE_MEANS:
        losses = torch.ones(3, requires_grad=True)
        result = surrogate_mean(losses, torch.zeros(3), torch.tensor([0, 0, 1]), 2, mean, LENGTH)
        result.backward()
        assert (result.item(), losses.grad.tolist()) == (0.0, [0.0] * 3)


@pytest.mark.parametrize(("name", "value"), [("mean", "turns"), ("length", 0), ("turn_ids", torch.tensor([0, 2]))])
def test_wrong_arguments_are_named(name, value):
    good = {"losses": torch.ones(2), "mask": torch.ones(2), "turn_ids": torch.tensor([0, 1]), "num_turns": 2}
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        surrogate_mean(**good | {"mean": "rows", "length": 3} | {name: value})
