"""Divergences between whole next-token distributions, and from the engine's."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import rel_entr, softmax

from trial_ray.objectives.divergences import engine_divergences, generalised_jsd

logit = st.floats(-8, 8, allow_subnormal=False)
pairs = st.integers(2, 6).flatmap(lambda size: st.tuples(*[st.lists(logit, min_size=size, max_size=size)] * 2))
mixes = st.sampled_from([0.1, 0.5, 0.9])


@given(pairs, mixes, st.sampled_from([0.5, 1.0, 1.1]))
def test_equals_scipy(distributions, mix, temperature):
    student, teacher = (softmax([value / temperature for value in values]) for values in distributions)
    mixture = mix * teacher + (1 - mix) * student
    expected = mix * rel_entr(teacher, mixture).sum() + (1 - mix) * rel_entr(student, mixture).sum()
    logits = torch.tensor(distributions, dtype=torch.float64)
    assert generalised_jsd(logits[:1], logits[1:], mix, temperature).item() == pytest.approx(expected, abs=1e-12)


def test_disjoint_distributions_reach_the_bound_with_finite_gradients():
    student = torch.tensor([[200.0, 0.0, -200.0]], requires_grad=True)
    value = generalised_jsd(student, torch.tensor([[-200.0, 0.0, 200.0]]))
    value.sum().backward()
    assert value.item() == pytest.approx(math.log(2))
    assert student.grad.isfinite().all()


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
    with pytest.raises(ValueError, match="logprobs"):
        engine_divergences(torch.zeros(2), torch.zeros(3))
