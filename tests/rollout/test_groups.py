"""Groups and their samples: returns, starts, and variance, which is 0 if and only if the method's advantages are all 0."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from synthetic_groups import synthetic_groups

from trial_ray import GiGPOConfig, GRPOConfig, Method
from trial_ray.errors import TrainingDivergedError
from trial_ray.learner.rows import group_turn_rows
from trial_ray.rollout.groups import GroupRequest, GroupSample
from trial_ray.trajectory import Trajectory, Turn


def sample_of(group, config):
    return GroupSample.from_group(GroupRequest(0, group.task_id, len(group.trajectories), 0), group, config)


def group_of(lengths=(2, 2, 2), success=False, **changed):
    """Rollouts that all earned the same, of turns that are alike."""
    (group,) = synthetic_groups(num_groups=1, group_size=len(lengths))
    turn = replace(group.trajectories[0].turns[0], valid=True, **changed)
    for trajectory, length in zip(group.trajectories, lengths, strict=True):
        trajectory.turns, trajectory.success, trajectory.score = [turn] * length, success, 0.25
    return group


@pytest.mark.parametrize("differing", ["success", "score", "return", None])
@pytest.mark.parametrize("reward", ["success", "score", "return", "per_turn"])
def test_variance_is_that_of_the_chosen_reward(reward, differing):
    group = group_of((1, 2, 3), success=differing != "success")
    first = group.trajectories[0]
    first.success, first.score = True, 0.5 if differing == "score" else 0.25
    first.turns = [replace(first.turns[0], reward=float(differing == "return"))]
    counts = (reward, "success", "return") if reward == "per_turn" else (reward,)
    assert sample_of(group, GRPOConfig().training(reward=reward)).zero_variance == (differing not in counts)


class LongestFirst(Method):
    def advantages(self, groups):
        return torch.tensor(
            [float(k == 2) for group in groups for each in group.completed for k, _ in enumerate(each.turns)]
        )


class LongestFirstConfig(GRPOConfig):
    method_class = LongestFirst


def test_an_own_methods_advantages_decide():
    assert sample_of(group_of((1, 2)), LongestFirstConfig()).zero_variance
    assert not sample_of(group_of((1, 3)), LongestFirstConfig()).zero_variance


@pytest.mark.parametrize("config", [GRPOConfig(), GRPOConfig().training(reward="per_turn"), GiGPOConfig()])
def test_failed_rollouts_do_not_make_a_variance(config):
    group = group_of(reward=0.0)
    group.trajectories[2].success = True
    assert not sample_of(group, config).zero_variance
    group.trajectories[2].ended = "failed"
    assert sample_of(group, config).zero_variance
    for trajectory in group.trajectories:
        trajectory.ended = "failed"
    assert sample_of(group, config).zero_variance


@pytest.mark.parametrize("reward", ["score", "per_turn"])
def test_a_reward_that_is_not_finite_is_left_to_the_learner(reward):
    group, config = group_of(reward=1e308), GRPOConfig().training(reward=reward, reward_scale=1e10)
    group.trajectories[0].score = math.inf
    assert not sample_of(group, config).zero_variance
    with pytest.raises(TrainingDivergedError):
        group_turn_rows([group], config)


@pytest.mark.parametrize(
    ("rewards", "expected"), [((1e6, -1e6 + 10.0), 10.0), ((0.1, 0.2, -0.3), 0.0), ((math.inf, -math.inf), math.nan)]
)
def test_return_is_the_sum_of_the_rewards(rewards, expected):
    trajectory = Trajectory("", "", 0, [Turn(reward=reward) for reward in rewards])
    assert trajectory.episode_return == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("part", [{"observation": "Elsewhere."}, {"prompt_ids": np.array([3, 5])}, {}])
def test_rollouts_of_a_group_begin_alike(part):
    group = group_of()
    other = group.trajectories[1]
    other.turns[0] = replace(other.turns[0], **part)
    assert sample_of(group, GRPOConfig()).starts_differ == bool(part)
    other.ended = "failed"
    assert not group.starts_differ
