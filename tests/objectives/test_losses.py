import math

import objective_reference as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trial_ray.objectives.allocation import hindsight_gap, relative_weights, turn_scores
from trial_ray.objectives.divergences import k3_divergence
from trial_ray.objectives.losses import (
    clamp_saturated,
    clipped_surrogate,
    dense_hindsight_loss,
    joint_loss,
)

COEFFICIENT = 0.5


def leaf(columns):
    return columns["logp"].clone().requires_grad_()


def surrogate_of(columns, logprobs, **clips):
    return clipped_surrogate(logprobs, columns["old"], columns["advantage"], columns["mask"], **clips)


def dense_of(columns, logprobs):
    old_gap = hindsight_gap(columns["teacher"], columns["old"])
    scores, counts = turn_scores(old_gap, columns["mask"], columns["turn_ids"], columns["num_turns"])
    weights = relative_weights(scores, counts, columns["trajectory_ids"])[columns["turn_ids"]]
    gap = hindsight_gap(columns["teacher"], logprobs)
    return dense_hindsight_loss(logprobs, gap, weights, columns["mask"])


def gradient_of(loss, logprobs):
    return torch.autograd.grad(loss, logprobs)[0]


def assert_gradient(loss, logprobs, function):
    numeric = reference.numeric_gradient(function, logprobs.tolist())
    assert gradient_of(loss, logprobs).tolist() == pytest.approx(numeric, abs=1e-5, rel=1e-5)


def far_from_kinks(batch):
    """Central differences are no gradient where the surrogate has a corner."""
    return all(
        abs(math.exp(t.logp - t.old) - edge) > 1e-4 and abs(t.advantage) > 1e-3
        for t in reference.tokens_of(batch)
        for edge in (0.8, 0.9, 1.2, 1.5, 3.0)
    )


finite_differences = settings(max_examples=40)
smooth_batches = reference.batches.filter(far_from_kinks)


@pytest.mark.parametrize("clips", [{}, {"dual": 3.0}, {"low": 0.1, "high": 0.5}])
@finite_differences
@given(batch=smooth_batches)
def test_surrogate_and_its_gradient_equal_the_loop(clips, batch):
    columns = reference.flat(batch)
    logprobs = leaf(columns)
    names = {"dual": "dual_clip", "low": "clip_low", "high": "clip_high"}
    loss = surrogate_of(columns, logprobs, **{names[name]: value for name, value in clips.items()})
    assert loss.item() == pytest.approx(reference.surrogate(batch, logprobs.tolist(), **clips))
    assert_gradient(loss, logprobs, lambda logps: reference.surrogate(batch, logps, **clips))


@finite_differences
@given(batch=reference.batches)
def test_dense_loss_and_its_gradient_equal_the_loop(batch):
    columns = reference.flat(batch)
    logprobs = leaf(columns)
    loss = dense_of(columns, logprobs)
    assert loss.item() == pytest.approx(reference.dense(batch, logprobs.tolist()))
    assert_gradient(loss, logprobs, lambda logps: reference.dense(batch, logps))


@finite_differences
@given(batch=smooth_batches, alpha=st.sampled_from([0.0, 0.1, 1.0, 3.0]))
def test_joint_loss_and_its_gradient_equal_the_loop(batch, alpha):
    columns = reference.flat(batch)
    logprobs = leaf(columns)
    surrogate, dense = surrogate_of(columns, logprobs), dense_of(columns, logprobs)
    loss = joint_loss(surrogate, surrogate, dense, COEFFICIENT, alpha)
    function = lambda logps: reference.joint(batch, logps, COEFFICIENT, alpha)  # noqa: E731
    assert loss.item() == pytest.approx(function(logprobs.tolist()))
    if abs(abs(COEFFICIENT * dense.item()) - alpha * abs(surrogate.item())) > 1e-4:
        assert_gradient(loss, logprobs, function)


# --- Eq. 7


def test_unit_weights_and_no_clip_are_the_sampled_reverse_kl():
    """The expected dense gradient over sampled tokens is that of KL(π_θ ‖ π_T); here exactly, over a vocabulary."""
    torch.manual_seed(0)
    logits = torch.randn(5, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(5, dtype=torch.float64).log_softmax(0)
    policy = logits.log_softmax(0)
    gap = hindsight_gap(teacher, policy, clip=math.inf)
    # One "token" per vocabulary entry, each counted with its probability of being sampled.
    probabilities = policy.detach().exp()
    dense = sum(
        p * dense_hindsight_loss(policy[i : i + 1], gap[i : i + 1], torch.ones(1), torch.ones(1))
        for i, p in enumerate(probabilities)
    )
    again = logits.log_softmax(0)
    reverse_kl = (again.exp() * (again - teacher)).sum()
    assert torch.allclose(gradient_of(dense, logits), gradient_of(reverse_kl, logits))


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


def test_nothing_is_saturated_during_warm_up():
    assert not clamp_saturated(torch.tensor(0.0), torch.tensor(0.1), 0.0, 1.0)


@given(*[st.floats(-2, 2)] * 2, st.floats(0.01, 1), st.floats(0, 3))
def test_saturation_is_what_takes_the_gradient(surrogate, dense, coefficient, alpha):
    loss, (_, _, through_dense) = joint_gradients(surrogate, dense, alpha, coefficient)
    tensors = (torch.tensor(x, dtype=torch.float64) for x in (surrogate, dense))
    assert bool(clamp_saturated(*tensors, coefficient, alpha)) == (through_dense == 0)
    assert abs(loss - 0.25) <= alpha * abs(surrogate) + 1e-12


# --- k3


@given(st.lists(st.tuples(st.floats(-8, 0), st.floats(-8, 0), st.booleans()), max_size=6))
def test_k3_equals_the_loop(tokens):
    logprobs = torch.tensor([t[0] for t in tokens], dtype=torch.float64, requires_grad=True)
    others = torch.tensor([t[1] for t in tokens], dtype=torch.float64)
    mask = torch.tensor([t[2] for t in tokens], dtype=torch.bool)

    def function(logps):
        values = [min(10.0, math.exp(r - p) - (r - p) - 1) for p, (_, r, m) in zip(logps, tokens, strict=True) if m]
        return math.fsum(values) / len(values) if values else 0.0

    loss = k3_divergence(logprobs, others, mask)
    assert loss.item() == pytest.approx(function(logprobs.tolist()), abs=1e-12)
    if all(abs(math.exp(r - p) - (r - p) - 11) > 1e-3 for p, r, _ in tokens):
        assert_gradient(loss, logprobs, function)


def test_k3_of_a_vanished_token_is_bounded_and_finite():
    logprobs = torch.tensor([-500.0, 0.0], requires_grad=True)
    loss = k3_divergence(logprobs, torch.tensor([0.0, -500.0]), torch.ones(2))
    loss.backward()
    assert loss.item() == 10.0
    assert logprobs.grad.isfinite().all()
