"""Plan piece: which learner scores and trains which rows, and in which order."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ray.rllib.connectors.connector_v2 import ConnectorV2

from trial_ray.learner.connectors.group_advantages import TURN_ROWS
from trial_ray.learner.update_plan import UpdatePlan, plan_update
from trial_ray.rollout.trajectory import TrajectoryGroup

if TYPE_CHECKING:
    from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

UPDATE_PLAN = "update_plan"
"""Key in ``shared_data`` under which the plan is found."""


class PlanRows(ConnectorV2):
    """Plan the update from the lengths of all rows; every learner makes the same plan."""

    def __init__(self, config: AlgorithmConfig, iteration: Callable[[], int]) -> None:
        super().__init__()
        self.config = config
        self.iteration = iteration

    def __call__(
        self, *, batch: dict[str, Any], episodes: list[TrajectoryGroup], shared_data: dict[str, Any], **kwargs: Any
    ) -> dict[str, Any]:
        """Put an :class:`UpdatePlan` into ``shared_data``."""
        rows = shared_data[TURN_ROWS]
        lengths = iter([len(turn.prompt_ids) + len(turn.response_ids) for turn in rows.turns])
        survivors = [trajectory for group in episodes for trajectory in group.survivors]
        trajectory_tokens = [[next(lengths) for _ in trajectory.turns] for trajectory in survivors]
        shared_data[UPDATE_PLAN] = self._plan(trajectory_tokens)
        return batch

    def _plan(self, trajectory_tokens: list[list[int]]) -> UpdatePlan:
        config = self.config
        return plan_update(
            trajectory_tokens,
            minibatch_rows=config.minibatch_rows,
            microbatch_rows=config.microbatch_rows,
            num_learners=max(1, config.num_learners),
            batch_shards=config.batch_shards,
            num_epochs=config.num_epochs,
            shuffle_seed=(config.seed or 0, self.iteration()) if config.shuffle else None,
            weighting=config.microbatch_weighting,
        )
