"""Divergences between whole next-token distributions, and from the engine's."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.distance import jensenshannon
from scipy.special import rel_entr, softmax

from trial_ray.objectives.divergences import engine_divergences, generalised_jsd

logit = st.floats(-8, 8, allow_subnormal=False)
pairs = st.integers(2, 6).flatmap(lambda size: st.tuples(*[st.lists(logit, min_size=size, max_size=size)] * 2))
mixes = st.sampled_from([0.1, 0.5, 0.9])


def both(student, teacher):
    return (torch.tensor([values], dtype=torch.float64) for values in (student, teacher))


@given(pairs, mixes, st.sampled_from([0.5, 1.0, 1.1]))
def test_equals_scipy(distributions, mix, temperature):
    student, teacher = (softmax([value / temperature for value in values]) for values in distributions)
    mixture = mix * teacher + (1 - mix) * student
    expected = mix * rel_entr(teacher, mixture).sum() + (1 - mix) * rel_entr(student, mixture).sum()
    found = generalised_jsd(*both(*distributions), mix, temperature).item()
    assert found == pytest.approx(expected, abs=1e-12)
    if mix == 0.5:
        assert found == pytest.approx(jensenshannon(student, teacher) ** 2, abs=1e-9)


def test_distributions_that_share_nothing_reach_the_bound_with_finite_gradients():
    student = torch.tensor([[200.0, 0.0, -200.0]], requires_grad=True)
    value = generalised_jsd(student, torch.tensor([[-200.0, 0.0, 200.0]]))
    value.sum().backward()
    assert value.item() == pytest.approx(math.log(2))
    assert student.grad.isfinite().all()


def test_divergences_from_the_engine_are_raw():
    """By the definitions, token by token; a difference of 30 nats is not clamped away."""
    learner, engine = [-1.0, -2.5, -0.1, -31.0], [-1.1, -2.0, -0.1, -1.0]
    differences = [a - b for a, b in zip(learner, engine, strict=True)]
    found = engine_divergences(*(torch.tensor(each, dtype=torch.float64) for each in (learner, engine)))
    expected = {
        "logprob_diff": sum(map(abs, differences)) / 4,
        "logprob_diff_max": 30.0,
        "ratio_mean": sum(map(math.exp, differences)) / 4,
        "ratio_max": math.exp(0.1),
        "kl": sum(math.exp(d) - 1 - d for d in differences) / 4,
    }
    assert {name: value.item() for name, value in found.items()} == pytest.approx(expected, rel=1e-12)


def test_divergences_from_the_engine_are_finite_unless_an_input_is_no_number():
    found = engine_divergences(torch.tensor([-1.0, 0.0]), torch.tensor([-1.0, -200.0]))
    assert found["ratio_max"].item() == pytest.approx(math.exp(20))
    assert all(value.isfinite() for value in found.values())
    found = engine_divergences(torch.tensor([-1.0, math.nan]), torch.tensor([-1.0, -1.0]))
    assert all(value.isnan() for value in found.values())
    with pytest.raises(ValueError, match="of one length"):
        engine_divergences(torch.zeros(2), torch.zeros(3))
