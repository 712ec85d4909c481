"""Importance weights at their bounds; ``tests/learner/test_update_gradient.py`` compares them with loops."""

import math

import pytest
import torch

from trial_ray.objectives import IMPORTANCE_MODES
from trial_ray.objectives.importance import effective_sample_size, importance_weights


@pytest.mark.parametrize("mode", IMPORTANCE_MODES)
def test_ratios_of_one_and_extreme_ratios(mode):
    """A ratio at the cap is kept."""
    zeros = torch.zeros(4)
    assert importance_weights(zeros, zeros, torch.tensor([0, 0, 1, 1]), 2, 1.0, mode).tolist() == [1.0] * 4
    weights = importance_weights(zeros[:3], torch.tensor([-500.0, 500.0, 0.0]), torch.arange(3), 3, 2.0, mode)
    assert weights.tolist() == [2.0 if mode.endswith("truncate") else 0.0, 0.0, 1.0]


@pytest.mark.parametrize("mode", ["sequence_truncate", "sequence_mask"])
def test_ratio_of_a_long_response_is_exact_in_any_order(mode):
    """A float32 sum of so many tokens is off by a percent, which moves responses across the cap."""
    generator = torch.Generator().manual_seed(0)
    differences = 3 * torch.randn(50_000, generator=generator)
    differences[-1] -= differences.double().sum().float()
    exact = math.exp(math.fsum(differences.tolist()))
    for order in (torch.arange(50_000), torch.randperm(50_000, generator=generator)):
        one_turn = torch.zeros_like(order)
        weights = importance_weights(differences[order], torch.zeros(50_000), one_turn, 1, 2.0, mode)
        torch.testing.assert_close(weights.double(), torch.full_like(weights.double(), exact), rtol=1e-6, atol=0)


def test_effective_sample_size_equals_its_formula():
    learner, engine = torch.tensor([[-1.0, -2.0, -0.5, -3.0], [-1.0, -3.5, -2.5, -0.1]], dtype=torch.float64)
    ratios = (learner - engine).exp()
    expected = ratios.sum() ** 2 / (4 * ratios.square().sum())
    assert effective_sample_size(learner, engine).item() == pytest.approx(expected.item())
    # The squares of these ratios are not finite.
    zeros = torch.zeros(4)
    assert effective_sample_size(zeros, zeros - 300.0).item() == pytest.approx(1.0)
    assert effective_sample_size(zeros, torch.tensor([-500.0, 0.0, 0.0, 0.0])).item() == pytest.approx(0.25)
