"""Losses: masks, extreme ratios, and the clamp of Eq. 8; ``tests/algorithms`` has the methods' values."""

import math

import pytest
import torch

from trial_ray.objectives import SURROGATE_MEANS
from trial_ray.objectives.divergences import k3_divergence
from trial_ray.objectives.losses import (
    clipped_surrogate,
    dense_hindsight_loss,
    joint_loss,
    surrogate_mean,
)

LOSSES = {
    "surrogate": lambda logprobs, others, mask: clipped_surrogate(logprobs, others, others, mask),
    "dense": lambda logprobs, others, mask: dense_hindsight_loss(logprobs, others, others, mask),
    "k3": k3_divergence,
}
of_each_loss = pytest.mark.parametrize("loss_of", LOSSES.values(), ids=LOSSES)


def gradient_of(loss, logprobs):
    return torch.autograd.grad(loss, logprobs)[0]


# --- masks


@pytest.mark.parametrize("length", [0, 3])
@of_each_loss
def test_empty_mask_gives_zero_with_a_graph(length, loss_of):
    logprobs = torch.full((length,), -math.inf, requires_grad=True)
    loss = loss_of(logprobs, torch.ones(length), torch.zeros(length))
    assert loss.item() == 0
    assert gradient_of(loss, logprobs).tolist() == [0.0] * length


@pytest.mark.parametrize("value", [1e30, -1e30, math.inf, -math.inf])
@of_each_loss
def test_masked_tokens_have_no_influence(value, loss_of):
    def loss_and_gradient(last, last_of_others):
        logprobs = torch.tensor([-0.5, -0.7, last], requires_grad=True)
        loss = loss_of(logprobs, torch.tensor([-0.6, 0.9, last_of_others]), torch.tensor([True, True, False]))
        return [loss.item(), *gradient_of(loss, logprobs).tolist()]

    expected = loss_and_gradient(-1.0, -0.3)
    assert expected[-1] == 0
    for last, last_of_others in ((value, -0.3), (-1.0, value), (value, -value)):
        assert loss_and_gradient(last, last_of_others) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dual", [3.0, None])
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
@pytest.mark.parametrize("log_ratio", [89.0, 800.0, math.inf, -89.0, -math.inf])
def test_extreme_ratios_give_finite_gradients(log_ratio, advantage, dual, dtype):
    """exp(89) is infinite in float32; its product with a clipped gradient of 0 must not become NaN."""
    logprobs = torch.zeros(2, dtype=dtype, requires_grad=True)
    old, advantages = torch.tensor([[-log_ratio, 0.0], [advantage, 1.0]], dtype=dtype)
    loss = clipped_surrogate(logprobs, old, advantages, torch.ones(2), dual_clip=dual)
    assert loss.isfinite()
    assert gradient_of(loss, logprobs).tolist() == pytest.approx([0.0, -0.5], abs=1e-30)


# --- Eq. 8


@pytest.mark.parametrize(
    ("surrogate", "dense", "alpha", "coefficient", "contribution", "slope"),
    [
        (-0.2, 0.7, 2.0, 1.0, 0.4, 0.0),
        (0.2, -0.7, 2.0, 1.0, -0.4, 0.0),
        (-0.2, -0.7, 2.0, 0.5, -0.35, 0.5),
        # A term exactly at the boundary counts as saturated, even at 0.
        (0.5, -0.5, 1.0, 1.0, -0.5, 0.0),
        (0.0, 0.0, 1.0, 1.0, 0.0, 0.0),
        (0.5, 0.1, 0.0, 1.0, 0.0, 0.0),
        (0.0, 0.1, math.inf, 1.0, 0.1, 1.0),
        (0.5, 0.1, 1.0, 0.0, 0.0, 0.0),
    ],
)
def test_clamp_bounds_the_dense_term_and_no_other_gradient(surrogate, dense, alpha, coefficient, contribution, slope):
    terms = [torch.tensor(term, dtype=torch.float64, requires_grad=True) for term in (0.25, surrogate, dense)]
    loss = joint_loss(*terms, coefficient, alpha)
    assert loss.item() == pytest.approx(0.25 + contribution)
    gradients = torch.autograd.grad(loss, terms, allow_unused=True, materialize_grads=True)
    assert [gradient.item() for gradient in gradients] == [1.0, 0.0, slope]


# --- k3


def test_k3_of_an_improbable_token_is_bounded_and_finite():
    logprobs = torch.tensor([-500.0, 0.0], requires_grad=True)
    loss = k3_divergence(logprobs, torch.tensor([0.0, -500.0]), torch.ones(2))
    loss.backward()
    assert loss.item() == 10.0
    assert logprobs.grad.isfinite().all()


# --- means over whole responses


def test_a_turn_without_an_eligible_token_does_not_count():
    arguments = (torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1, 1, 0]), torch.tensor([0, 0, 1]), 2)
    means = {mean: surrogate_mean(*arguments, mean, 7).item() for mean in SURROGATE_MEANS}
    assert means == pytest.approx({"tokens": 1.5, "rows": 1.5, "fixed_length": 3 / 7})


@pytest.mark.parametrize(("name", "value"), [("mean", "turns"), ("length", 0), ("turn_ids", torch.tensor([0, 2]))])
def test_wrong_arguments_are_named(name, value):
    good = {"losses": torch.ones(2), "mask": torch.ones(2), "turn_ids": torch.tensor([0, 1]), "num_turns": 2}
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        surrogate_mean(**good | {"mean": "rows", "length": 3} | {name: value})
