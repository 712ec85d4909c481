"""Scoring piece: log π_old(y|h) and, where the method uses them, log π_T(y|h⁺) and the reference's log-probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModule
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from trial_ray.learner.connectors.group_advantages import TURN_ROWS
from trial_ray.learner.packing import score_rows

if TYPE_CHECKING:
    from ray.rllib.algorithms.algorithm_config import AlgorithmConfig


class ScoreRows(ConnectorV2):
    """Score every reply under the policy before the update: both views by the same weights, kernel and precision.

    With a lagged teacher, the privileged view is scored by the teacher instead.

    The learner's numbers, not the engine's, are the old log-probabilities; how far the engine's are from them is logged
    as ``engine/logprob_gap``.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        super().__init__()
        self.config = config

    def __call__(
        self,
        *,
        rl_module: MultiRLModule,
        batch: dict[str, Any],
        shared_data: dict[str, Any],
        metrics: MetricsLogger,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Fill the log-probabilities of the rows in ``shared_data``."""
        rows = shared_data[TURN_ROWS]
        module = rl_module[DEFAULT_MODULE_ID].unwrapped()
        model_rows = rows.model_rows()
        max_tokens = self.config.max_tokens_per_forward
        privileged = self.config.privileged_view is not None
        with module.autocast():
            rows.logprobs, rows.hindsight_logprobs = score_rows(
                module.lm, model_rows, two_views=privileged and module.teacher is None, max_tokens=max_tokens
            )
            if module.teacher is not None:
                hindsight_rows = [row.hindsight_row for row in model_rows]
                rows.hindsight_logprobs, _ = score_rows(
                    module.teacher, hindsight_rows, two_views=False, max_tokens=max_tokens
                )
            if module.reference is not None:
                rows.reference_logprobs, _ = score_rows(
                    module.reference, model_rows, two_views=False, max_tokens=max_tokens
                )
        behaviour = torch.from_numpy(np.concatenate([turn.logprobs for turn in rows.turns]))
        gap = (rows.logprobs.float().cpu() - behaviour).abs()
        metrics.log_value((DEFAULT_MODULE_ID, "engine", "logprob_gap"), gap.mean().item(), reduce="mean")
        metrics.log_value((DEFAULT_MODULE_ID, "engine", "logprob_gap_max"), gap.max().item(), reduce="max")
        return batch
