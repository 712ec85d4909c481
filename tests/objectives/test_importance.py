"""Importance weights of all modes at their bounds; ``tests/learner/test_update_gradient.py`` holds them against loops."""

import math

import pytest
import torch

from trial_ray.objectives.choices import IMPORTANCE_MODES
from trial_ray.objectives.importance import effective_sample_size, importance_weights

modes = pytest.mark.parametrize("mode", IMPORTANCE_MODES)


@modes
def test_policies_that_agree_weigh_one_and_a_ratio_at_the_cap_is_kept(mode):
    zeros, turns = torch.zeros(4), torch.tensor([0, 0, 1, 1])
    assert importance_weights(zeros, zeros, turns, 2, 1.0, mode).tolist() == [1.0] * 4


@modes
def test_ratios_beyond_all_numbers_are_bounded(mode):
    weights = importance_weights(torch.zeros(3), torch.tensor([-500.0, 500.0, 0.0]), torch.arange(3), 3, 2.0, mode)
    assert weights.tolist() == [2.0 if mode.endswith("truncate") else 0.0, 0.0, 1.0]


@pytest.mark.parametrize("mode", ["sequence_truncate", "sequence_mask"])
def test_the_ratio_of_a_long_response_is_that_of_its_tokens_in_any_order(mode):
    """Sums of so many tokens in float32 are off by a percent, which moves responses across the cap."""
    generator = torch.Generator().manual_seed(0)
    differences = 3 * torch.randn(50_000, generator=generator)
    differences[-1] -= differences.double().sum().float()
    exact = math.exp(math.fsum(differences.tolist()))
    one = torch.zeros(len(differences), dtype=torch.int64)
    for order in (torch.arange(len(one)), torch.randperm(len(one), generator=generator)):
        log_ratios = differences[order]
        weights = importance_weights(log_ratios, torch.zeros_like(log_ratios), one, 1, 2.0, mode)
        assert weights.tolist() == pytest.approx([exact] * len(one), rel=1e-6)


def test_effective_sample_size_equals_its_formula():
    learner, engine = [-1.0, -2.0, -0.5, -3.0], [-1.0, -3.5, -2.5, -0.1]
    ratios = [math.exp(new - old) for new, old in zip(learner, engine, strict=True)]
    flat = [torch.tensor(each, dtype=torch.float64) for each in (learner, engine)]
    expected = sum(ratios) ** 2 / (4 * sum(ratio**2 for ratio in ratios))
    assert effective_sample_size(*flat).item() == pytest.approx(expected)
    # No ratio is too large for its square.
    zeros = torch.zeros(4)
    assert effective_sample_size(zeros, zeros - 300.0).item() == pytest.approx(1.0)
    assert effective_sample_size(zeros, torch.tensor([-500.0, 0.0, 0.0, 0.0])).item() == pytest.approx(0.25)
