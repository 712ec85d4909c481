"""Rewards of turns and rewards by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
from synthetic_groups import synthetic_groups

from trial_ray.algorithms import GRPOConfig
from trial_ray.errors import TrainingDivergedError
from trial_ray.learner.rows import group_turn_rows
from trial_ray.rollout.groups import RolloutCounts


def test_a_named_reward_is_a_mean_over_the_rollouts_that_have_it():
    (group,) = synthetic_groups(vocab_size=400, num_groups=1, group_size=4)
    for trajectory, rewards in zip(
        group.trajectories, ({"form": 1.0}, {"form": -0.5, "speed": 2.0}, {}, {"speed": 9.0}), strict=True
    ):
        trajectory.rewards = rewards
    group.trajectories[3].ended = "failed"
    counts = RolloutCounts.of(group.trajectories[:2]) + RolloutCounts.of(group.trajectories[2:])
    means = {name: value for name, value in counts.metrics().items() if name.startswith("rewards/")}
    assert means == {"rewards/form_mean": 0.25, "rewards/speed_mean": 2.0}
    assert counts.metrics() == pytest.approx(RolloutCounts.of(group.trajectories).metrics())


def test_a_turn_is_compared_with_the_same_turn_of_other_rollouts():
    """γ = 0.5: one of the second turns has reward 1, the other 0; only one rollout has a third turn."""
    (group,) = synthetic_groups(vocab_size=400, num_groups=1, group_size=2)
    for trajectory, rewards in zip(group.trajectories, ((0.0, 1.0), (0.0, 0.0, 0.0)), strict=True):
        trajectory.success = True
        turn = replace(trajectory.turns[0], valid=True)
        trajectory.turns = [replace(turn, reward=reward) for reward in rewards]
    config = GRPOConfig().training(reward="per_turn", advantage_norm="mean_norm", turn_discount=0.5, turn_coeff=2.0)
    assert group_turn_rows([group], config).advantages.tolist() == [0.5, 1.0, -0.5, -1.0, 0.0]
    for trajectory in group.trajectories:
        trajectory.turns = [replace(turn, reward=1e305) for turn in trajectory.turns]
    with pytest.raises(TrainingDivergedError):
        group_turn_rows([group], config.training(reward_scale=1e10))


def test_truncated_responses_can_be_masked_in_the_loss():
    groups = synthetic_groups(vocab_size=400, num_groups=2, group_size=3)
    first = groups[0].trajectories[0]
    first.turns[0] = replace(first.turns[0], finish_reason="length")
    plain = group_turn_rows(groups, GRPOConfig())
    masked = group_turn_rows(groups, GRPOConfig().training(mask_truncated=True))
    assert plain.mask.all()
    truncated = [turn.finish_reason == "length" for turn in masked.turns]
    assert masked.mask.tolist() == [not truncated[turn] for turn in masked.turn_ids.tolist()]
    assert masked.advantages.tolist() == plain.advantages.tolist()
