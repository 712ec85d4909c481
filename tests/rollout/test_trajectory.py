"""Rollouts and what they earned."""

from __future__ import annotations

import dataclasses

import pytest
from synthetic_groups import synthetic_groups


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ((1e6, -1e6 + 10.0), 10.0),
        ((0.1, 0.2, -0.3), 0.0),
        ((float("inf"), float("-inf")), float("nan")),
    ],
)
def test_the_return_is_the_sum_of_the_rewards(rewards, expected):
    (group,) = synthetic_groups(vocab_size=400, num_groups=1, group_size=1)
    turn = group.trajectories[0].turns[0]
    group.trajectories[0].turns = [dataclasses.replace(turn, reward=reward) for reward in rewards]
    assert group.trajectories[0].episode_return == pytest.approx(expected, nan_ok=True)
