"""A group's variance is that of the reward that its advantages are made of."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from synthetic_groups import synthetic_groups

from trial_ray.algorithms import GRPOConfig
from trial_ray.learner.rows import group_turn_rows


@pytest.mark.parametrize("differing", ["success", "score", "return", None])
@pytest.mark.parametrize("reward", ["success", "score", "return", "per_turn"])
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
    counts = (reward, "success", "return") if reward == "per_turn" else (reward,)
    assert group.has_variance(reward) == (differing in counts)
    advantages = group_turn_rows([group], GRPOConfig().training(reward=reward)).advantages
    assert bool(advantages.any()) == (differing in counts)


SAME = {
    "they cancel": ((0.1, 0.1, 0.1, -0.1, -0.1, -0.1), (0.1, -0.1, 0.1, -0.1, 0.1, -0.1)),
    "float32": (map(float, np.float32([0.1, 0.2, 0.4])), map(float, np.float32([0.7]))),
}


@pytest.mark.parametrize("rewards", SAME.values(), ids=list(SAME))
@pytest.mark.parametrize("statistics", ["trajectories", "rows"])
def test_rewards_that_sum_up_to_the_same_make_no_variance(rewards, statistics):
    (group,) = synthetic_groups(vocab_size=400, num_groups=1, group_size=2)
    for trajectory, own in zip(group.trajectories, map(list, rewards), strict=True):
        turn = dataclasses.replace(trajectory.turns[0], valid=True)
        trajectory.turns = [dataclasses.replace(turn, reward=reward) for reward in own]
    assert not group.has_variance("return", row_penalty=0.01)
    config = GRPOConfig().training(reward="return", advantage_statistics=statistics)
    assert not group_turn_rows([group], config).advantages.any()


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
