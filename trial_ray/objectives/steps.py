"""Returns from a turn on, and their means over turns that start from the same observation (GiGPO; Feng et al., 2025)."""

from __future__ import annotations

import torch
from torch import Tensor

from trial_ray.objectives.checks import flat_floats, flat_ids
from trial_ray.objectives.segments import renumber, segment_sum


def discounted_returns(rewards: Tensor, trajectory_ids: Tensor, discount: float) -> Tensor:
    """Return from each turn on: G_k = r_k + γ G_{k+1}, within its trajectory.

    Args:
        rewards: float ``[K]``, reward of each turn, turns of a trajectory in the order in which they were taken.
        trajectory_ids: integer ``[K]``, from 0; turns with the same id form a trajectory, wherever they stand.
        discount: γ, in [0, 1].

    Returns:
        Float ``[K]`` in the dtype of ``rewards``, detached.

    Raises:
        ValueError: wrong shape or dtype, NaN, a negative id, or ``discount`` out of range.
    """
    rewards = flat_floats("rewards", rewards).detach()
    trajectory_ids = flat_ids("trajectory_ids", trajectory_ids, ("rewards", rewards))
    if not 0 <= discount <= 1:
        raise ValueError(f"discount must be in [0, 1], got {discount}")
    following: dict[int, float] = {}
    returns = rewards.clone()
    for turn in range(len(rewards) - 1, -1, -1):
        trajectory = int(trajectory_ids[turn])
        following[trajectory] = float(rewards[turn]) + discount * following.get(trajectory, 0.0)
        returns[turn] = following[trajectory]
    return returns


def group_means(values: Tensor, group_ids: Tensor) -> Tensor:
    """Mean of each value's group, float ``[K]``, detached: of step returns over equal observations, a step's value.

    Args:
        values: float ``[K]``.
        group_ids: integer ``[K]``, from 0, in any order; equal ids form a group.

    Raises:
        ValueError: wrong shape or dtype, NaN, or a negative id.
    """
    values = flat_floats("values", values).detach()
    groups, num_groups = renumber(flat_ids("group_ids", group_ids, ("values", values)))
    sizes = segment_sum(torch.ones_like(values), groups, num_groups)
    return (segment_sum(values, groups, num_groups) / sizes)[groups]
