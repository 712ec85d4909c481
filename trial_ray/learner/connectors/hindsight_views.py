"""Hindsight piece: the outcome view of every turn, as token ids that go into its prompt (Eq. 2, Eq. 3)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModule

from trial_ray.hindsight.aug import encode_evidence
from trial_ray.hindsight.outcome_view import outcome_view
from trial_ray.learner.connectors.group_advantages import TURN_ROWS
from trial_ray.rollout.trajectory import TrajectoryGroup

if TYPE_CHECKING:
    from ray.rllib.algorithms.algorithm_config import AlgorithmConfig


class HindsightViews(ConnectorV2):
    """Serialise what each decision led to; the recorded reply itself stays as it is."""

    def __init__(self, config: AlgorithmConfig) -> None:
        super().__init__()
        self.config = config

    def __call__(
        self,
        *,
        rl_module: MultiRLModule,
        batch: dict[str, Any],
        episodes: list[TrajectoryGroup],
        shared_data: dict[str, Any],
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Fill the evidence of the rows in ``shared_data``."""
        tokenizer = rl_module[DEFAULT_MODULE_ID].unwrapped().tokenizer
        views = [
            outcome_view(
                turn.outcome,
                terminal=trajectory.ended == "terminated" and index == len(trajectory.turns) - 1,
                success=trajectory.success,
            )
            for group in episodes
            for trajectory in group.survivors
            for index, turn in enumerate(trajectory.turns)
        ]
        shared_data[TURN_ROWS].evidence_ids = [
            encode_evidence(view, tokenizer, self.config.max_outcome_tokens) for view in views
        ]
        return batch
