"""Steps of a group that start from the same observation: their returns, and the value of starting there."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from trial_ray.objectives.steps import discounted_returns, group_means
from trial_ray.rollout.trajectory import Trajectory, TrajectoryGroup

VALUE_DISCOUNT = 0.95
"""γ of :func:`step_values`, as GiGPO chooses it."""


def anchor_ids(groups: Iterable[TrajectoryGroup]) -> torch.Tensor:
    """Number of each turn's anchor observation, int64 ``[K]``, over the turns of all survivors in order.

    Turns share a number where their task group and their raw observation are the same.
    """
    numbers: dict[tuple[int, str], int] = {}
    anchors = (
        (index, turn.observation)
        for index, group in enumerate(groups)
        for trajectory in group.survivors
        for turn in trajectory.turns
    )
    return torch.tensor([numbers.setdefault(anchor, len(numbers)) for anchor in anchors])


def step_returns(groups: Iterable[TrajectoryGroup], reward: str, discount: float) -> torch.Tensor:
    """Discounted return from each turn of all survivors on, float64 ``[K]``, in units of the unscaled reward.

    Args:
        groups: the groups of an update.
        reward: as ``GRPOConfig.training``; success and score arrive with the last turn.
        discount: γ.
    """
    trajectories = [trajectory for group in groups for trajectory in group.survivors]
    rewards = torch.tensor([value for each in trajectories for value in _rewards(each, reward)], dtype=torch.float64)
    lengths = torch.tensor([len(trajectory.turns) for trajectory in trajectories])
    return discounted_returns(rewards, torch.repeat_interleave(torch.arange(len(trajectories)), lengths), discount)


def step_values(groups: Iterable[TrajectoryGroup]) -> torch.Tensor:
    """Mean discounted success from each turn's observation on, float64 ``[K]`` in [0, 1], as GiGPO estimates it."""
    groups = list(groups)
    return group_means(step_returns(groups, "success", VALUE_DISCOUNT), anchor_ids(groups))


def _rewards(trajectory: Trajectory, reward: str) -> list[float]:
    if reward == "return":
        return [turn.reward for turn in trajectory.turns]
    return [0.0] * (len(trajectory.turns) - 1) + [trajectory.outcome_reward(reward)]
