"""Masks, extreme ratios, the clamp of Eq. 8, divergences and importance weights; ``tests/algorithms`` has the methods' values."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import rel_entr, softmax

from trial_ray.objectives import IMPORTANCE_MODES
from trial_ray.objectives.divergences import engine_divergences, generalised_jsd, k3_divergence
from trial_ray.objectives.losses import (
    clipped_losses,
    dense_hindsight_loss,
    effective_sample_size,
    importance_weights,
    joint_loss,
)
from trial_ray.objectives.segments import zero_outside


def clipped_surrogate(logprobs, old_logprobs, advantages, mask, dual_clip=None):
    """The mean over eligible tokens. Losses outside the mask would change it, because all losses are added up."""
    losses = clipped_losses(zero_outside(logprobs - old_logprobs, mask.bool()), advantages, mask, dual_clip=dual_clip)
    return losses.sum() / mask.sum().clamp(min=1)


LOSSES = [
    lambda logprobs, others, mask: clipped_surrogate(logprobs, others, others, mask),
    lambda logprobs, others, mask: dense_hindsight_loss(logprobs, others, others, mask),
    k3_divergence,
]


def gradient_of(loss, logprobs):
    return torch.autograd.grad(loss, logprobs)[0]


# --- masks


@pytest.mark.parametrize("length", [0, 3])
@pytest.mark.parametrize("loss_of", LOSSES)
def test_empty_mask_gives_zero_with_a_graph(length, loss_of):
    logprobs = torch.full((length,), -math.inf, requires_grad=True)
    loss = loss_of(logprobs, torch.ones(length), torch.zeros(length))
    assert loss.item() == 0
    assert gradient_of(loss, logprobs).tolist() == [0.0] * length


@pytest.mark.parametrize("value", [1e30, math.inf, -math.inf])
@pytest.mark.parametrize("loss_of", LOSSES)
def test_masked_tokens_have_no_influence(value, loss_of):
    def loss_and_gradient(last, last_of_others):
        logprobs = torch.tensor([-0.5, -0.7, last], requires_grad=True)
        loss = loss_of(logprobs, torch.tensor([-0.6, 0.9, last_of_others]), torch.tensor([True, True, False]))
        return [loss.item(), *gradient_of(loss, logprobs).tolist()]

    expected = loss_and_gradient(-1.0, -0.3)
    assert expected[-1] == 0
    for last, last_of_others in ((value, -0.3), (-1.0, value), (value, -value)):
        assert loss_and_gradient(last, last_of_others) == expected


@pytest.mark.parametrize("dual", [3.0, None])
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
@pytest.mark.parametrize("log_ratio", [89.0, math.inf, -math.inf])
def test_extreme_ratios_give_finite_gradients(log_ratio, advantage, dual):
    """exp(89) is infinite in float32; its product with a clipped gradient of 0 must not become NaN."""
    logprobs = torch.zeros(2, requires_grad=True)
    old, advantages = torch.tensor([[-log_ratio, 0.0], [advantage, 1.0]])
    loss = clipped_surrogate(logprobs, old, advantages, torch.ones(2), dual)
    assert loss.isfinite()
    assert gradient_of(loss, logprobs).tolist() == pytest.approx([0.0, -0.5], abs=1e-30)


# --- Eq. 8


def test_clamp_bounds_the_dense_term_and_no_other_gradient():
    for surrogate, dense, alpha, coefficient, contribution, slope in (
        (-0.2, 0.7, 2.0, 1.0, 0.4, 0.0),
        (0.2, -0.7, 2.0, 1.0, -0.4, 0.0),
        (-0.2, -0.7, 2.0, 0.5, -0.35, 0.5),
        # A term exactly at the boundary counts as saturated, even at 0.
        (0.5, -0.5, 1.0, 1.0, -0.5, 0.0),
        (0.0, 0.0, 1.0, 1.0, 0.0, 0.0),
        (0.5, 0.1, 0.0, 1.0, 0.0, 0.0),
        (0.0, 0.1, math.inf, 1.0, 0.1, 1.0),
        (0.0, 0.1, 1.0, 0.0, 0.0, 0.0),
    ):
        terms = [torch.tensor(term, dtype=torch.float64, requires_grad=True) for term in (0.25, surrogate, dense)]
        loss, saturated = joint_loss(*terms, coefficient, alpha)
        assert loss.item() == pytest.approx(0.25 + contribution)
        gradients = torch.autograd.grad(loss, terms, allow_unused=True, materialize_grads=True)
        assert [gradient.item() for gradient in gradients] == [1.0, 0.0, slope]
        assert saturated.item() is (slope == 0 and coefficient > 0)


# --- k3


def test_k3_of_an_improbable_token_is_bounded_and_finite():
    logprobs = torch.tensor([-500.0, 0.0], requires_grad=True)
    loss = k3_divergence(logprobs, torch.tensor([0.0, -500.0]), torch.ones(2))
    assert loss.item() == 10.0
    assert gradient_of(loss, logprobs).isfinite().all()


# --- divergences and importance weights


logit = st.floats(-8, 8, allow_subnormal=False)
pairs = st.integers(2, 6).flatmap(lambda size: st.tuples(*[st.lists(logit, min_size=size, max_size=size)] * 2))


@given(pairs, st.sampled_from([0.1, 0.5, 0.9]), st.sampled_from([0.5, 1.0, 1.1]))
def test_divergence_equals_scipys(distributions, mix, temperature):
    student, teacher = (softmax([value / temperature for value in values]) for values in distributions)
    mixture = mix * teacher + (1 - mix) * student
    expected = mix * rel_entr(teacher, mixture).sum() + (1 - mix) * rel_entr(student, mixture).sum()
    logits = torch.tensor(distributions, dtype=torch.float64)
    assert generalised_jsd(logits[:1], logits[1:], mix, temperature).item() == pytest.approx(expected, abs=1e-12)


def test_disjoint_distributions_reach_the_bound_with_finite_gradients():
    student = torch.tensor([[200.0, 0.0, -200.0]], requires_grad=True)
    value = generalised_jsd(student, torch.tensor([[-200.0, 0.0, 200.0]]))
    assert value.item() == pytest.approx(math.log(2))
    assert gradient_of(value.sum(), student).isfinite().all()


def test_engine_divergences_equal_their_definitions():
    """A difference of 30 nats is not clamped."""
    learner, engine = torch.tensor([[-1.0, -2.5, -0.1, -31.0], [-1.1, -2.0, -0.1, -1.0]], dtype=torch.float64)
    differences = (learner - engine).tolist()
    expected = {
        "logprob_diff": sum(map(abs, differences)) / 4,
        "logprob_diff_max": 30.0,
        "ratio_mean": sum(map(math.exp, differences)) / 4,
        "ratio_max": math.exp(0.1),
        "kl": sum(math.exp(d) - 1 - d for d in differences) / 4,
    }
    divergences = engine_divergences(learner, engine)
    assert {name: value.item() for name, value in divergences.items()} == pytest.approx(expected, rel=1e-12)


def test_engine_divergences_are_finite_unless_an_input_is_nan():
    divergences = engine_divergences(torch.tensor([-1.0, 0.0]), torch.tensor([-1.0, -200.0]))
    assert divergences["ratio_max"].item() == pytest.approx(math.exp(20))
    assert all(value.isfinite() for value in divergences.values())
    divergences = engine_divergences(torch.tensor([-1.0, math.nan]), torch.tensor([-1.0, -1.0]))
    assert all(value.isnan() for value in divergences.values())


@pytest.mark.parametrize("mode", IMPORTANCE_MODES)
def test_ratios_of_one_and_extreme_ratios(mode):
    """A ratio at the cap is kept."""
    zeros, turn_ids = torch.zeros(4), torch.tensor([0, 0, 0, 1])
    assert importance_weights(zeros, zeros, turn_ids, 2, 1.0, mode).tolist() == [1.0] * 4
    weights = importance_weights(zeros, torch.tensor([-500.0, 500.0, -0.5, -500.0]), turn_ids, 2, 2.0, mode)
    beyond, inside = 2.0 if mode.endswith("truncate") else 0.0, math.exp(0.5)
    first_turn = [beyond, 0.0, inside] if mode.startswith("token") else [inside] * 3
    assert weights.tolist() == pytest.approx([*first_turn, beyond])


def test_ratio_of_a_long_response_is_exact_in_any_order():
    """A float32 sum of so many tokens is off by a percent, which moves responses across the cap."""
    differences = 3 * torch.randn(50_000)
    differences[-1] -= differences.double().sum().float()
    exact = math.exp(math.fsum(differences.tolist()))
    for order in (torch.arange(50_000), torch.randperm(50_000)):
        zeros = torch.zeros_like(order)
        weights = importance_weights(differences[order], zeros.float(), zeros, 1, 2.0, "sequence_mask")
        assert weights.unique().tolist() == [pytest.approx(exact, rel=1e-6)]


def test_effective_sample_size_equals_its_formula():
    engine = torch.tensor([0.0, -1.5, -2.0, 2.9])
    ratios = (-engine).exp()
    expected = ratios.sum() ** 2 / (4 * ratios.square().sum())
    # The squares of the later ratios are not finite.
    cases = [(engine, expected), (torch.full((4,), -300.0), 1.0), (torch.tensor([-500.0, 0.0, 0.0, 0.0]), 0.25)]
    for behaviour, size in cases:
        assert float(effective_sample_size(torch.zeros(4), behaviour)) == pytest.approx(float(size))
