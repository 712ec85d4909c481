"""Allocation piece: from the two views' scores to the turn weights w_k (Eq. 4 to Eq. 6)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from trial_ray.learner.connectors.group_advantages import TURN_ROWS
from trial_ray.learner.turn_rows import TurnRows
from trial_ray.objectives.allocation import (
    hindsight_gap,
    permuted_weights,
    relative_weights,
    turn_scores,
    uniform_weights,
)

if TYPE_CHECKING:
    from ray.rllib.algorithms.algorithm_config import AlgorithmConfig


class TurnWeights(ConnectorV2):
    """Build the allocation profile from the frozen scoring snapshot; it is fixed during the update."""

    def __init__(self, config: AlgorithmConfig, iteration: Callable[[], int]) -> None:
        super().__init__()
        self.config = config
        self.iteration = iteration

    def __call__(
        self, *, batch: dict[str, Any], shared_data: dict[str, Any], metrics: MetricsLogger, **kwargs: Any
    ) -> dict[str, Any]:
        """Fill the weights of the rows in ``shared_data``; log ``trial/turn_score_mean`` and ``trial/turn_weight_std``."""
        rows: TurnRows = shared_data[TURN_ROWS]
        gap = hindsight_gap(rows.hindsight_logprobs.cpu(), rows.logprobs.cpu(), self.config.gap_clip)
        mask = torch.ones(len(gap), dtype=torch.bool)
        scores, counts = turn_scores(gap, mask, rows.turn_ids, len(rows))
        rows.weights = self._allocate(scores, counts, rows.trajectory_ids)
        metrics.log_value((DEFAULT_MODULE_ID, "trial", "turn_score_mean"), scores.mean().item(), reduce="mean")
        metrics.log_value((DEFAULT_MODULE_ID, "trial", "gap_mean"), gap.mean().item(), reduce="mean")
        metrics.log_value(
            (DEFAULT_MODULE_ID, "trial", "turn_weight_std"), rows.weights.std(correction=0).item(), reduce="mean"
        )
        return batch

    def _allocate(self, scores: torch.Tensor, counts: torch.Tensor, trajectory_ids: torch.Tensor) -> torch.Tensor:
        if self.config.allocation == "uniform":
            return uniform_weights(scores, counts, trajectory_ids)
        if self.config.allocation == "permuted":
            # Seeded by the iteration, so that a resumed run permutes as an uninterrupted one does.
            generator = torch.Generator().manual_seed(((self.config.seed or 0) << 32) + self.iteration())
            return permuted_weights(scores, counts, trajectory_ids, generator)
        return relative_weights(scores, counts, trajectory_ids)
