"""First piece: from groups of trajectories to turn rows with their advantages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from ray.rllib.connectors.connector_v2 import ConnectorV2

from trial_ray.learner.turn_rows import TurnRows
from trial_ray.objectives.advantages import group_relative_advantages, penalised_advantages
from trial_ray.rollout.trajectory import TrajectoryGroup

if TYPE_CHECKING:
    from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

TURN_ROWS = "turn_rows"
"""Key in ``shared_data`` under which the pieces hand the rows on."""


class GroupAdvantages(ConnectorV2):
    """Lay the turns of all surviving rollouts end to end, in task order, and give each its advantage (Eq. 1)."""

    def __init__(self, config: AlgorithmConfig) -> None:
        super().__init__()
        self.config = config

    def __call__(
        self, *, batch: dict[str, Any], episodes: list[TrajectoryGroup], shared_data: dict[str, Any], **kwargs: Any
    ) -> dict[str, Any]:
        """Put :class:`TurnRows` into ``shared_data``."""
        shared_data[TURN_ROWS] = group_turn_rows(episodes, self.config)
        return batch


def group_turn_rows(groups: list[TrajectoryGroup], config: AlgorithmConfig) -> TurnRows:
    """Turn rows of ``groups`` with advantages; see :class:`GroupAdvantages`."""
    survivors = [(index, trajectory) for index, group in enumerate(groups) for trajectory in group.survivors]
    turns = [turn for _, trajectory in survivors for turn in trajectory.turns]
    turns_per_trajectory = torch.tensor([len(trajectory.turns) for _, trajectory in survivors], dtype=torch.int64)
    trajectory_ids = torch.repeat_interleave(torch.arange(len(survivors)), turns_per_trajectory)
    group_ids = torch.tensor([index for index, _ in survivors], dtype=torch.int64)
    rewards = [config.reward_scale * trajectory.outcome_reward(config.reward) for _, trajectory in survivors]
    returns = torch.tensor(rewards, dtype=torch.float64)
    charges = [0.0 if turn.valid else config.invalid_action_penalty for turn in turns]
    penalties = torch.tensor(charges, dtype=torch.float64)
    if config.advantage_statistics == "rows":
        row_returns = returns[trajectory_ids] - penalties
        advantages = group_relative_advantages(row_returns, group_ids[trajectory_ids], config.advantage_epsilon)
    else:
        advantages = penalised_advantages(returns, group_ids, penalties, trajectory_ids, config.advantage_epsilon)
    return TurnRows(turns, trajectory_ids, advantages)
