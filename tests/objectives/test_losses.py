import math

import pytest
import torch

from trial_ray.objectives.choices import SURROGATE_MEANS
from trial_ray.objectives.divergences import k3_divergence
from trial_ray.objectives.losses import (
    clipped_surrogate,
    dense_hindsight_loss,
    joint_loss,
)
from trial_ray.objectives.responses import surrogate_mean


def gradient_of(loss, logprobs):
    return torch.autograd.grad(loss, logprobs)[0]


# --- empty masks and what they leave out


def losses_of(logprobs, others, mask):
    yield clipped_surrogate(logprobs, others, others, mask)
    yield dense_hindsight_loss(logprobs, others, others, mask)
    yield k3_divergence(logprobs, others, mask)


@pytest.mark.parametrize("length", [0, 3])
@pytest.mark.parametrize("which", range(3))
def test_no_eligible_token_gives_zero_with_a_graph(length, which):
    logprobs = torch.full((length,), -math.inf, requires_grad=True)
    loss = list(losses_of(logprobs, torch.ones(length), torch.zeros(length)))[which]
    loss.backward()
    assert loss.item() == 0
    assert logprobs.grad.tolist() == [0.0] * length


@pytest.mark.parametrize("garbage", [1e30, -1e30, math.inf, -math.inf])
@pytest.mark.parametrize("which", range(3))
def test_masked_tokens_have_no_influence(garbage, which):
    clean = torch.tensor([-0.5, -0.7, -1.0], requires_grad=True)
    others = torch.tensor([-0.6, 0.9, -0.3])
    mask = torch.tensor([True, True, False])
    expected = list(losses_of(clean, others, mask))[which]
    slope = gradient_of(expected, clean)
    assert slope[2] == 0
    for last, last_of_others in ((garbage, -0.3), (-1.0, garbage), (garbage, -garbage)):
        dirty = torch.tensor([-0.5, -0.7, last], requires_grad=True)
        loss = list(losses_of(dirty, torch.tensor([-0.6, 0.9, last_of_others]), mask))[which]
        assert loss.item() == expected.item()
        assert torch.equal(gradient_of(loss, dirty), slope)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dual", [3.0, None])
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
@pytest.mark.parametrize("log_ratio", [89.0, 800.0, math.inf, -89.0, -math.inf])
def test_no_ratio_is_too_large_for_the_gradient(log_ratio, advantage, dual, dtype):
    """exp(89) is infinite in float32; where a clip makes the gradient 0, the product with it was NaN."""
    logprobs = torch.zeros(2, dtype=dtype, requires_grad=True)
    old = torch.tensor([-log_ratio, 0.0], dtype=dtype)
    advantages = torch.tensor([advantage, 1.0], dtype=dtype)
    loss = clipped_surrogate(logprobs, old, advantages, torch.ones(2), dual_clip=dual)
    assert loss.isfinite()
    assert gradient_of(loss, logprobs).tolist() == pytest.approx([0.0, -0.5], abs=1e-30)


# --- Eq. 8


def joint_gradients(surrogate, dense, alpha=1.0, coefficient=1.0):
    outcome, surrogate, dense = (
        torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (0.25, surrogate, dense)
    )
    loss = joint_loss(outcome, surrogate, dense, coefficient, alpha)
    grads = torch.autograd.grad(loss, (outcome, surrogate, dense), allow_unused=True)
    return loss.item(), [0.0 if g is None else g.item() for g in grads]


@pytest.mark.parametrize(
    ("surrogate", "dense", "alpha", "coefficient", "contribution", "slope"),
    [
        (-0.2, 0.7, 2.0, 1.0, 0.4, 0.0),
        (0.2, -0.7, 2.0, 1.0, -0.4, 0.0),
        (-0.2, -0.7, 2.0, 0.5, -0.35, 0.5),
        # Exactly at the boundary counts as saturated, also where it is 0.
        (0.5, -0.5, 1.0, 1.0, -0.5, 0.0),
        (0.0, 0.0, 1.0, 1.0, 0.0, 0.0),
        (0.5, 0.1, 0.0, 1.0, 0.0, 0.0),
        (0.0, 0.1, math.inf, 1.0, 0.1, 1.0),
        (0.5, 0.1, 1.0, 0.0, 0.0, 0.0),
    ],
)
def test_the_clamp_bounds_the_dense_term_and_touches_no_other_gradient(
    surrogate, dense, alpha, coefficient, contribution, slope
):
    loss, gradients = joint_gradients(surrogate, dense, alpha, coefficient)
    assert loss == pytest.approx(0.25 + contribution)
    assert gradients == [1.0, 0.0, slope]


# --- k3


def test_k3_of_a_vanished_token_is_bounded_and_finite():
    logprobs = torch.tensor([-500.0, 0.0], requires_grad=True)
    loss = k3_divergence(logprobs, torch.tensor([0.0, -500.0]), torch.ones(2))
    loss.backward()
    assert loss.item() == 10.0
    assert logprobs.grad.isfinite().all()


# --- means over whole responses


LENGTH = 7


def test_a_turn_without_an_eligible_token_does_not_count():
    arguments = (torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1, 1, 0]), torch.tensor([0, 0, 1]), 2)
    found = {mean: surrogate_mean(*arguments, mean, LENGTH).item() for mean in SURROGATE_MEANS}
    assert found == pytest.approx({"tokens": 1.5, "rows": 1.5, "fixed_length": 3 / LENGTH})


@pytest.mark.parametrize(("name", "value"), [("mean", "turns"), ("length", 0), ("turn_ids", torch.tensor([0, 2]))])
def test_wrong_arguments_are_named(name, value):
    good = {"losses": torch.ones(2), "mask": torch.ones(2), "turn_ids": torch.tensor([0, 1]), "num_turns": 2}
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        surrogate_mean(**good | {"mean": "rows", "length": 3} | {name: value})
