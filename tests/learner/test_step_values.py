"""Step returns, anchors and values against the rules written as loops over rollouts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trial_ray.learner.rows import anchor_ids, step_returns, turn_index_ids
from trial_ray.rollout.trajectory import Trajectory, TrajectoryGroup, Turn


def turn(observation, reward=0.0):
    ids = np.zeros(1, np.int32)
    return Turn(ids, ids, np.zeros(1, np.float32), 1, 1, observation, "look", True, "", reward, "stop")


@st.composite
def rollouts(draw):
    steps = draw(st.lists(st.tuples(st.sampled_from("abc"), st.floats(-1, 1)), max_size=4))
    trajectory = Trajectory("t", "f", 0, [turn(*step) for step in steps], draw(st.booleans()), draw(st.floats(0, 1)))
    trajectory.ended = draw(st.sampled_from(["terminated", "terminated", "turn_limit", "failed"]))
    return trajectory


groups_of_rollouts = st.lists(
    st.builds(lambda trajectories: TrajectoryGroup("t", trajectories), st.lists(rollouts(), max_size=4)), max_size=3
).filter(lambda groups: any(group.survivors for group in groups))


def survivors(groups):
    return [
        (index, trajectory)
        for index, group in enumerate(groups)
        for trajectory in group.trajectories
        if trajectory.ended != "failed" and trajectory.turns
    ]


def naive_return(trajectory, place, reward, discount):
    rewards = [each.reward for each in trajectory.turns]
    if reward not in ("return", "per_turn"):
        rewards = [0.0] * len(rewards)
        rewards[-1] = float(trajectory.success) if reward == "success" else trajectory.score
    return sum(discount**later * value for later, value in enumerate(rewards[place:]))


def places(groups):
    return [(i, trajectory, k) for i, trajectory in survivors(groups) for k in range(len(trajectory.turns))]


@given(
    groups_of_rollouts,
    st.sampled_from(["success", "score", "return", "per_turn"]),
    st.sampled_from([0.0, 0.5, 0.95, 1.0]),
)
def test_step_returns_equal_the_discounted_sums(groups, reward, discount):
    expected = [naive_return(trajectory, k, reward, discount) for _, trajectory, k in places(groups)]
    found = step_returns(groups, reward, discount)
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx(expected, abs=1e-12)


@given(groups_of_rollouts)
def test_turns_share_a_number_exactly_where_group_and_observation_or_index_agree(groups):
    observations = [(i, trajectory.turns[k].observation) for i, trajectory, k in places(groups)]
    indices = [(i, k) for i, _, k in places(groups)]
    for ids, keys in ((anchor_ids(groups), observations), (turn_index_ids(groups), indices)):
        for one, key in zip(ids.tolist(), keys, strict=True):
            assert [other == one for other in ids.tolist()] == [other == key for other in keys]
