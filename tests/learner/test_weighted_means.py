"""Means over microbatches of several learners are those of one."""

from __future__ import annotations

import pytest
import torch

from trial_ray.learner.loss import WeightedMeans, means


def added(values: list[tuple[float, float]]) -> WeightedMeans:
    result = WeightedMeans()
    for weight, value in values:
        with result.weighing(weight):
            result.add("grpo", {"kl": torch.tensor(value, dtype=torch.float64)})
    return result


def test_learners_with_unequal_shares_have_the_mean_of_all():
    values = [(0.5, 1.0), (0.3, 2.0), (0.2, 10.0)]
    alone = means([added(values).take()])
    shared = means([added(values[:1]).take(), added([]).take(), added(values[1:]).take()])
    assert alone == shared == {("grpo", "kl"): pytest.approx(0.5 + 0.6 + 2.0)}


def test_what_is_added_without_a_weight_does_not_count_and_taking_starts_anew():
    sums = added([(0.0, 99.0), (2.0, 3.0)])
    sums.add("grpo", {"kl": torch.tensor(77.0)})
    assert means([sums.take()]) == {("grpo", "kl"): 3.0}
    assert means([sums.take()]) == {}
