"""Groups and their samples: returns, starts, and variance, which is 0 if and only if the method's advantages are all 0."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from synthetic_groups import synthetic_groups

from trial_ray import GiGPOConfig, GRPOConfig
from trial_ray.learner.method import Method
from trial_ray.rollout.groups import GroupRequest, GroupSample
from trial_ray.trajectory import TrajectoryGroup


def sample_of(group: TrajectoryGroup, config: GRPOConfig) -> GroupSample:
    return GroupSample.from_group(GroupRequest(0, group.task_id, len(group.trajectories), 0), group, config)


def group_of(lengths=(2, 2, 2), success: bool = False, **changed) -> TrajectoryGroup:
    """Rollouts that all earned the same, of turns that are alike."""
    (group,) = synthetic_groups(vocab_size=400, num_groups=1, group_size=len(lengths))
    for trajectory, length in zip(group.trajectories, lengths, strict=True):
        turn = dataclasses.replace(trajectory.turns[0], valid=True, **changed)
        trajectory.turns, trajectory.success, trajectory.score = [turn] * length, success, 0.25
    return group


@pytest.mark.parametrize("differing", ["success", "score", "return", None])
@pytest.mark.parametrize("reward", ["success", "score", "return", "per_turn"])
def test_variance_is_that_of_the_chosen_reward(reward, differing):
    group = group_of((1, 2, 3), success=differing != "success")
    first = group.trajectories[0]
    first.success, first.score = True, 0.5 if differing == "score" else 0.25
    first.turns = [dataclasses.replace(first.turns[0], reward=float(differing == "return"))]
    counts = (reward, "success", "return") if reward == "per_turn" else (reward,)
    assert sample_of(group, GRPOConfig().training(reward=reward)).zero_variance == (differing not in counts)


SAME = {
    "they cancel": ((0.1, 0.1, 0.1, -0.1, -0.1, -0.1), (0.1, -0.1, 0.1, -0.1, 0.1, -0.1)),
    "float32": (map(float, np.float32([0.1, 0.2, 0.4])), map(float, np.float32([0.7]))),
}


@pytest.mark.parametrize("rewards", SAME.values(), ids=list(SAME))
@pytest.mark.parametrize("statistics", ["trajectories", "rows"])
def test_rewards_that_sum_up_to_the_same_make_no_variance(rewards, statistics):
    group = group_of((1, 1))
    for trajectory, own in zip(group.trajectories, map(list, rewards), strict=True):
        trajectory.turns = [dataclasses.replace(trajectory.turns[0], reward=reward) for reward in own]
    config = GRPOConfig().training(reward="return", advantage_statistics=statistics)
    assert sample_of(group, config).zero_variance


@pytest.mark.parametrize("statistics", ["trajectories", "rows"])
@pytest.mark.parametrize("scale", [1.0, 1e6])
def test_a_penalty_makes_a_variance_while_it_is_more_than_rounding(statistics, scale):
    """A group in which all rollouts failed and one response was malformed has a gradient: minus the penalty."""
    group = group_of(success=True)
    first = group.trajectories[0]
    first.turns = [dataclasses.replace(first.turns[0], valid=False), *first.turns[1:]]
    config = GRPOConfig().training(advantage_statistics=statistics, reward_scale=scale, invalid_action_penalty=0.1)
    lost_in_rounding = statistics == "rows" and scale == 1e6
    assert sample_of(group, config).zero_variance == lost_in_rounding
    assert sample_of(group, config.training(invalid_action_penalty=0.0)).zero_variance


@pytest.mark.parametrize(
    ("lengths", "coefficient", "expected"), [((1, 2, 3), 1.0, False), ((1, 2, 3), 0.0, True), ((2, 2, 2), 1.0, False)]
)
def test_equal_outcomes_have_variance_if_the_method_compares_steps(lengths, coefficient, expected):
    """A step that is nearer to the success returns more; all observations are the same here."""
    group = group_of(lengths, success=True)
    assert sample_of(group, GiGPOConfig().training(step_coeff=coefficient)).zero_variance is expected
    assert sample_of(group, GRPOConfig()).zero_variance


class LongestFirst(Method):
    def advantages(self, groups):
        return torch.tensor(
            [float(k == 2) for group in groups for each in group.survivors for k, _ in enumerate(each.turns)]
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


def test_a_reward_that_is_not_finite_is_left_to_the_learner():
    group = group_of()
    group.trajectories[0].score = math.inf
    assert not sample_of(group, GRPOConfig().training(reward="score")).zero_variance


@pytest.mark.parametrize(
    ("rewards", "expected"), [((1e6, -1e6 + 10.0), 10.0), ((0.1, 0.2, -0.3), 0.0), ((math.inf, -math.inf), math.nan)]
)
def test_return_is_the_sum_of_the_rewards(rewards, expected):
    (trajectory,) = group_of((1,)).trajectories
    trajectory.turns = [dataclasses.replace(trajectory.turns[0], reward=reward) for reward in rewards]
    assert trajectory.episode_return == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("part", [{"observation": "Elsewhere."}, {"prompt_ids": np.array([3, 5], np.int32)}, {}])
def test_rollouts_of_a_group_begin_alike(part):
    group = group_of()
    start = dataclasses.replace(group.trajectories[0].turns[0], observation="Here.")
    for trajectory in group.trajectories:
        trajectory.turns[0] = start
    group.trajectories[1].turns[0] = dataclasses.replace(start, **part)
    assert sample_of(group, GRPOConfig()).starts_differ == bool(part)
    group.trajectories[1].ended = "failed"
    assert not group.starts_differ
