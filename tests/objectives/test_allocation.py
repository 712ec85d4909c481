"""Turn weights of TRIAL and of its controls."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trial_ray.objectives.allocation import (
    hindsight_gap,
    permuted_weights,
    relative_weights,
    turn_scores,
    uniform_weights,
)

logprob = st.floats(-6, 0, allow_subnormal=False)
turns = st.lists(st.tuples(logprob, logprob, st.booleans()), max_size=4)
batches = st.lists(st.lists(turns, min_size=1, max_size=5), min_size=1, max_size=4)
"""``batch[trajectory][turn]`` is a list of tokens: log π_T, log π_old, and whether the token is in the mask."""


@given(batches, st.integers(0, 2**32))
def test_token_weighted_mean_is_one(batch, seed):
    owned = [(number, turn) for number, trajectory in enumerate(batch) for turn in trajectory]
    tokens = [(place, *token) for place, (_, turn) in enumerate(owned) for token in turn]
    turn_ids, teacher, old, mask = torch.tensor(tokens, dtype=torch.float64).reshape(len(tokens), 4).T
    scores, counts = turn_scores(hindsight_gap(teacher, old), mask, turn_ids.long(), len(owned))
    trajectory_ids = torch.tensor([number for number, _ in owned])
    permuted = partial(permuted_weights, generator=torch.Generator().manual_seed(seed))
    for weigh in (relative_weights, uniform_weights, permuted):
        weights = weigh(scores, counts, trajectory_ids)
        tokens, totals = (torch.zeros(len(batch)).double() for _ in range(2))
        tokens.index_add_(0, trajectory_ids, counts.double())
        totals.index_add_(0, trajectory_ids, counts * weights)
        torch.testing.assert_close(totals, tokens, atol=1e-9, rtol=1e-9)
        assert weights[counts == 0].eq(0).all()
        assert weights.ge(0).all()


def test_papers_example():
    weights = relative_weights(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([4, 4, 4]), torch.zeros(3).long())
    assert torch.allclose(weights, torch.tensor([0.5, 1.0, 1.5]))


@pytest.mark.parametrize(
    ("scores", "expected"), [([0.0, 0.0], [1, 1]), ([0.0, 1.8e-8], [1, 1]), ([0.0, 2.2e-8], [0, 2])]
)
def test_numerically_zero_mean_score_gives_unit_weights(scores, expected):
    """A mean score of 0.9e-8 counts as zero, 1.1e-8 does not; another trajectory is not changed."""
    scores = torch.tensor([*scores, 0.0, 0.1, 0.3], dtype=torch.float64)
    weights = relative_weights(scores, torch.tensor([3, 3, 0, 5, 5]), torch.tensor([8, 8, 8, 2, 2]))
    assert weights.tolist() == pytest.approx([*expected, 0, 0.5, 1.5])


def test_turns_may_be_in_any_order():
    scores, counts = torch.rand(9, dtype=torch.float64), torch.randint(0, 5, (9,))
    trajectory_ids, order = torch.arange(9) // 3, torch.tensor([8, 0, 3, 5, 1, 7, 2, 6, 4])
    weights = relative_weights(scores, counts, trajectory_ids)
    assert torch.allclose(relative_weights(scores[order], counts[order], trajectory_ids[order]), weights[order])


def test_infinite_ratio_outside_the_mask_is_ignored():
    scores, _ = turn_scores(torch.tensor([0.5, math.inf]), torch.tensor([1, 0]), torch.tensor([0, 0]), 1)
    assert scores.tolist() == [0.5]


def test_no_turns_at_all():
    empty, ids = torch.zeros(0), torch.zeros(0, dtype=torch.long)
    scores, counts = turn_scores(hindsight_gap(empty, empty), empty, ids, 0)
    assert relative_weights(scores, counts, ids).shape == (0,)
    assert permuted_weights(scores, counts, ids, torch.Generator()).shape == (0,)
