"""Importance weights of all modes against loops over ragged turns."""

import math

import objective_reference as reference
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trial_ray.objectives.choices import IMPORTANCE_MODES
from trial_ray.objectives.importance import effective_sample_size, importance_weights

modes = pytest.mark.parametrize("mode", IMPORTANCE_MODES)


def weights_of(batch, cap, mode, dtype=torch.float64):
    columns = reference.flat(batch, dtype)
    return importance_weights(columns["old"], columns["teacher"], columns["turn_ids"], columns["num_turns"], cap, mode)


def far_from(cap, batch):
    """A ratio within rounding of the cap may be masked or not."""
    return all(
        abs(value - cap) > 1e-9 * cap for value in reference.importance(batch, math.inf, "token_truncate")
    ) and all(abs(value - cap) > 1e-9 * cap for value in reference.importance(batch, math.inf, "sequence_truncate"))


@modes
@given(batch=reference.batches, cap=st.floats(1.01, 10.0))
def test_weights_equal_the_loop(mode, batch, cap):
    if not far_from(cap, batch):
        return
    bounded = [min(value, math.exp(20)) for value in reference.importance(batch, cap, mode)]
    assert weights_of(batch, cap, mode).tolist() == pytest.approx(bounded, rel=1e-12)


@modes
def test_policies_that_agree_weigh_one_and_a_ratio_at_the_cap_is_kept(mode):
    zeros, turns = torch.zeros(4), torch.tensor([0, 0, 1, 1])
    assert importance_weights(zeros, zeros, turns, 2, 1.0, mode).tolist() == [1.0] * 4


def test_a_sequence_is_one_turn_and_its_tokens_share_a_weight():
    old = torch.tensor([-1.0, -1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    engine = old - torch.tensor([0.5, 0.4, 0.5, -0.2, 3.0], dtype=torch.float64)
    turns = torch.tensor([0, 0, 1, 1, 2])
    truncated = importance_weights(old, engine, turns, 3, 2.0, "sequence_truncate")
    masked = importance_weights(old, engine, turns, 3, 2.0, "sequence_mask")
    assert truncated.tolist() == pytest.approx([2.0, 2.0, math.exp(0.3), math.exp(0.3), 2.0])
    assert masked.tolist() == pytest.approx([0.0, 0.0, math.exp(0.3), math.exp(0.3), 0.0])


@modes
def test_ratios_beyond_all_numbers_are_bounded(mode):
    weights = importance_weights(torch.zeros(3), torch.tensor([-500.0, 500.0, 0.0]), torch.arange(3), 3, 2.0, mode)
    assert weights.tolist() == [2.0 if mode.endswith("truncate") else 0.0, 0.0, 1.0]


def test_an_unknown_mode_is_named():
    with pytest.raises(ValueError, match=r"mode must be one of token_truncate.*got 'sequence'"):
        importance_weights(torch.zeros(1), torch.zeros(1), torch.zeros(1, dtype=torch.long), 1, 2.0, "sequence")


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
