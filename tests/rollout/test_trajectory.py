"""Rollouts and what they earned."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from synthetic_groups import synthetic_groups

from trial_ray.algorithms import GRPOConfig
from trial_ray.rollout.groups import GroupRequest, GroupSample


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


@pytest.mark.parametrize("part", [{"observation": "Elsewhere."}, {"prompt_ids": np.array([3, 5], np.int32)}, {}])
def test_rollouts_of_a_group_begin_alike(part):
    (group,) = synthetic_groups(vocab_size=400, num_groups=1, group_size=3)
    start = dataclasses.replace(group.trajectories[0].turns[0], observation="Here.")
    for trajectory in group.trajectories:
        trajectory.turns[0] = start
    group.trajectories[1].turns[0] = dataclasses.replace(start, **part)
    sample = GroupSample.from_group(GroupRequest(0, "task", 3, 0), group, GRPOConfig())
    assert sample.starts_differ == bool(part)
    group.trajectories[1].ended = "failed"
    assert not group.starts_differ
