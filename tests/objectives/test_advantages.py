"""Advantages at the edges of float arithmetic, and turn weights; ``tests/algorithms`` has the methods' values."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trial_ray.objectives import ADVANTAGE_ESTIMATORS, equal_up_to_rounding
from trial_ray.objectives.advantages import group_relative_advantages, penalised_advantages, rescaled_advantages
from trial_ray.objectives.allocation import (
    hindsight_gap,
    permuted_weights,
    relative_weights,
    turn_scores,
    uniform_weights,
)

ONE_GROUP = torch.zeros(8, dtype=torch.long)


@pytest.mark.parametrize("estimator", ADVANTAGE_ESTIMATORS)
def test_groups_without_a_difference_have_no_advantage(estimator):
    returns, ids, none = torch.tensor([5.0, 3.0, 3.0]), torch.tensor([0, 1, 1]), torch.zeros(3)
    found = penalised_advantages(returns, ids, none, torch.arange(3), estimator=estimator)
    assert torch.equal(found, none)


@pytest.mark.parametrize("scale", [2.0**-30, 10.0, 2.0**900])
def test_returns_that_differ_by_rounding_are_equal(scale):
    returns = scale * torch.tensor([0.7, math.nextafter(0.7, 1)], dtype=torch.float64)
    assert group_relative_advantages(returns, ONE_GROUP[:2]).tolist() == [0.0, 0.0]
    result = penalised_advantages(returns, ONE_GROUP[:2], torch.tensor([0.1, 0.0]), torch.tensor([0, 1]))
    assert result.tolist() == pytest.approx([-0.1, 0.0])


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float64, 2.0**1023), (torch.float32, 2.0**100)])
def test_returns_of_any_size_are_compared(dtype, scale):
    """Squares of large returns, and the sum of the largest, are not finite."""
    parts, groups = torch.tensor([1.0, 1.5, -1.0, 0.75, 0.75], dtype=dtype), torch.tensor([0, 0, 0, 1, 1])
    expected, large = group_relative_advantages(parts, groups, 1e-6 / scale), scale * parts
    assert expected[:3].abs().min() > 0.3
    penalised = penalised_advantages(large, groups, torch.zeros_like(parts), torch.arange(5))
    assert group_relative_advantages(large, groups).tolist() == penalised.tolist() == expected.tolist()
    small, centred = (group_relative_advantages(each, groups, by_deviation=False) for each in (parts, large))
    assert torch.equal(centred, scale * small)


@pytest.mark.parametrize("spread", [1e-12, 1e-6, 1e-3, 1.0])
def test_nearly_equal_returns_do_not_enlarge_a_penalty(spread):
    returns = 10 * torch.tensor([0.5] * 7 + [0.5 + spread], dtype=torch.float64)
    penalties = torch.tensor([0.1] + [0.0] * 7, dtype=torch.float64)
    penalised = penalised_advantages(returns, ONE_GROUP, penalties, torch.arange(8))
    difference = group_relative_advantages(returns, ONE_GROUP) - penalised
    assert 0 < difference[0] <= 0.1 + 1e-12
    assert not difference[1:].any()


def test_extreme_log_ratios_rescale_up_to_the_clip():
    for gap, factor in ((math.inf, 1.2), (-500.0, 0.8)):
        result = rescaled_advantages(torch.tensor([0.0, 1.0, -1.0]), torch.full((3,), gap), 1.0)
        assert result.tolist() == pytest.approx([0.0, factor, factor - 2])


def test_equality_up_to_rounding():
    equal = [(0.0, 0.0), (-1.0, -1.0 + 1e-7)]
    different = [(1.0, 1.0 + 1e-5), (-1e-9, 1e-9), (-1.7e308, 1.7e308), (5.0, math.inf), (math.nan, math.nan)]
    for pairs, expected in ((equal, True), (different, False)):
        assert [equal_up_to_rounding(*pair) for pair in pairs] == [expected] * len(pairs)
        for dtype in (torch.float32, torch.float64):
            assert equal_up_to_rounding(*torch.tensor(pairs, dtype=dtype).T).tolist() == [expected] * len(pairs)


logprob = st.floats(-6, 0, allow_subnormal=False)
turns = st.lists(st.tuples(logprob, logprob, st.booleans()), max_size=4)
batches = st.lists(st.lists(turns, min_size=1, max_size=5), max_size=4)
"""``batch[trajectory][turn]`` is a list of tokens: log π_T, log π_old, and whether the token is in the mask."""


@given(batches, st.integers(0, 2**32), st.randoms(use_true_random=False))
def test_token_weighted_mean_is_one_in_any_order_of_the_turns(batch, seed, random):
    owned = [(number, turn) for number, trajectory in enumerate(batch) for turn in trajectory]
    random.shuffle(owned)
    tokens = [(place, *token) for place, (_, turn) in enumerate(owned) for token in turn]
    turn_ids, teacher, old, mask = torch.tensor(tokens, dtype=torch.float64).reshape(len(tokens), 4).T
    scores, counts = turn_scores(hindsight_gap(teacher, old), mask, turn_ids.long(), len(owned))
    trajectory_ids = torch.tensor([number for number, _ in owned], dtype=torch.long)
    permuted = partial(permuted_weights, generator=torch.Generator().manual_seed(seed))
    for weigh in (relative_weights, uniform_weights, permuted):
        weights = weigh(scores, counts, trajectory_ids)
        excess = torch.zeros(len(batch)).double().index_add(0, trajectory_ids, counts * (weights - 1))
        assert excess.abs().le(1e-9).all()
        assert weights[counts == 0].eq(0).all()
        assert weights.ge(0).all()


def test_each_turn_gets_the_weight_of_another_turn():
    ids = torch.tensor([0, 1, 0, 1, 0, 2, 0])
    turns = (torch.arange(1.0, 8.0), torch.ones(7), ids)
    own, found = relative_weights(*turns), permuted_weights(*turns, torch.Generator())
    for number in range(3):
        mine = ids == number
        assert torch.allclose(found[mine].sort().values, own[mine].sort().values)
    assert torch.isclose(found, own).tolist() == (ids == 2).tolist()


def test_numerically_zero_mean_score_gives_unit_weights():
    """A mean score of 0.9e-8 counts as zero, 1.1e-8 does not; another trajectory is not changed."""
    for score, expected in ((1.8e-8, [1, 1]), (2.2e-8, [0, 2])):
        scores = torch.tensor([0.0, score, 0.0, 0.1, 0.3], dtype=torch.float64)
        weights = relative_weights(scores, torch.tensor([3, 3, 0, 5, 5]), torch.tensor([8, 8, 8, 2, 2]))
        assert weights.tolist() == pytest.approx([*expected, 0, 0.5, 1.5])


def test_infinite_ratio_outside_the_mask_is_ignored():
    scores, _ = turn_scores(torch.tensor([0.5, math.inf]), torch.tensor([1, 0]), torch.tensor([0, 0]), 1)
    assert scores.tolist() == [0.5]
