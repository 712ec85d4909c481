"""A group's variance is that of the reward that its advantages are made of."""

from __future__ import annotations

import dataclasses

import pytest
from synthetic_groups import synthetic_groups

from trial_ray.algorithms import GRPOConfig
from trial_ray.learner.connectors import group_turn_rows


@pytest.mark.parametrize("differing", ["success", "score", "return", None])
@pytest.mark.parametrize("reward", ["success", "score", "return"])
def test_variance_is_that_of_the_chosen_reward(reward, differing):
    (group,) = synthetic_groups(vocab_size=400, num_groups=1, group_size=3)
    for place, trajectory in enumerate(group.trajectories):
        trajectory.success = differing == "success" and place == 0
        trajectory.score = 0.5 if differing == "score" and place == 0 else 0.25
        rewards = [1.0 if differing == "return" and place == 0 else 0.0, *[0.0] * (len(trajectory.turns) - 1)]
        trajectory.turns = [
            dataclasses.replace(turn, reward=value, valid=True)
            for turn, value in zip(trajectory.turns, rewards, strict=True)
        ]
    assert group.has_variance(reward) == (reward == differing)
    advantages = group_turn_rows([group], GRPOConfig().training(reward=reward)).advantages
    assert bool(advantages.any()) == (reward == differing)


def test_with_statistics_over_rows_a_penalty_makes_a_variance():
    (group,) = synthetic_groups(vocab_size=400, num_groups=1, group_size=3)
    config = GRPOConfig().training(advantage_statistics="rows", reward_scale=10.0, invalid_action_penalty=0.1)
    for trajectory in group.trajectories:
        trajectory.success = True
        trajectory.turns = [dataclasses.replace(turn, valid=True) for turn in trajectory.turns]
    assert not group.has_variance("success", row_penalty=0.01)
    assert not group_turn_rows([group], config).advantages.any()
    group.trajectories[0].turns[0] = dataclasses.replace(group.trajectories[0].turns[0], valid=False)
    assert group.has_variance("success", row_penalty=0.01)
    assert not group.has_variance("success")
    assert group_turn_rows([group], config).advantages.any()


def test_failed_rollouts_do_not_make_a_variance():
    (group,) = synthetic_groups(vocab_size=400, num_groups=1, group_size=3)
    for trajectory, success in zip(group.trajectories, (True, True, False), strict=True):
        trajectory.success = success
    assert group.has_variance("success")
    group.trajectories[2].ended = "failed"
    assert not group.has_variance("success")
