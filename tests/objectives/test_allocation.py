import math

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

ONE_TRAJECTORY = torch.zeros(3, dtype=torch.long)
logprob = st.floats(-6, 0, allow_subnormal=False)
turns = st.lists(st.tuples(logprob, logprob, st.booleans()), max_size=4)
batches = st.lists(st.lists(turns, min_size=1, max_size=5), min_size=1, max_size=4)
"""``batch[trajectory][turn]`` is a list of tokens: log π_T, log π_old, and whether it is in the mask."""


def profile(batch, weigh=relative_weights, scale=1.0):
    """Scores, eligible tokens and weights of all turns, and the trajectory of each."""
    owned = [(number, turn) for number, trajectory in enumerate(batch) for turn in trajectory]
    tokens = [(place, *token) for place, (_, turn) in enumerate(owned) for token in turn]

    def column(index, dtype=torch.float64):
        return torch.tensor([token[index] for token in tokens], dtype=dtype)

    gap = scale * hindsight_gap(column(1), column(2))
    scores, counts = turn_scores(gap, column(3, torch.bool), column(0, torch.long), len(owned))
    trajectory_ids = torch.tensor([number for number, _ in owned])
    return scores, counts, weigh(scores, counts, trajectory_ids), trajectory_ids


def token_weighted_means(weights, counts, trajectory_ids):
    for trajectory in trajectory_ids.unique():
        of = trajectory_ids == trajectory
        if counts[of].sum() > 0:
            yield float((counts[of] * weights[of]).sum() / counts[of].sum())


@given(batches, st.integers(0, 2**32))
def test_token_weighted_mean_is_one_for_every_profile(batch, seed):
    for weigh in (
        relative_weights,
        uniform_weights,
        lambda *turns: permuted_weights(*turns, torch.Generator().manual_seed(seed)),
    ):
        _, counts, weights, trajectory_ids = profile(batch, weigh)
        for mean in token_weighted_means(weights, counts, trajectory_ids):
            assert mean == pytest.approx(1, abs=1e-9)
        assert weights[counts == 0].eq(0).all()
        assert weights.ge(0).all()


def test_papers_example():
    weights = relative_weights(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([4, 4, 4]), ONE_TRAJECTORY)
    assert torch.allclose(weights, torch.tensor([0.5, 1.0, 1.5]))


@pytest.mark.parametrize(
    ("scores", "expected"), [([0.0, 0.0], [1, 1]), ([0.0, 1.8e-8], [1, 1]), ([0.0, 2.2e-8], [0, 2])]
)
def test_numerically_zero_gap_weighs_one(scores, expected):
    """The mean score decides: 0.9e-8 is nothing, 1.1e-8 is a profile."""
    scores = torch.tensor([*scores, 0.0, 0.1, 0.3], dtype=torch.float64)
    weights = relative_weights(scores, torch.tensor([3, 3, 0, 5, 5]), torch.tensor([8, 8, 8, 2, 2]))
    assert weights.tolist() == pytest.approx([*expected, 0, 0.5, 1.5]), "nor does it touch another trajectory"


def test_turns_may_come_in_any_order():
    scores, counts = torch.rand(9, dtype=torch.float64), torch.randint(0, 5, (9,))
    trajectory_ids = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2])
    order = torch.tensor([8, 0, 3, 5, 1, 7, 2, 6, 4])
    straight = relative_weights(scores, counts, trajectory_ids)
    assert torch.allclose(relative_weights(scores[order], counts[order], trajectory_ids[order]), straight[order])


def test_ineligible_infinity_does_not_reach_the_score():
    scores, _ = turn_scores(torch.tensor([0.5, math.inf]), torch.tensor([1, 0]), torch.tensor([0, 0]), 1)
    assert scores.tolist() == [0.5]


def test_no_turns_at_all():
    empty, ids = torch.zeros(0), torch.zeros(0, dtype=torch.long)
    scores, counts = turn_scores(hindsight_gap(empty, empty), empty, ids, 0)
    assert relative_weights(scores, counts, ids).shape == (0,)
    assert permuted_weights(scores, counts, ids, torch.Generator()).shape == (0,)
