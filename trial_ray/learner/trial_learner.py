"""The learner of TRIAL: hindsight views, the turn profile, and the dense loss beside the outcome loss."""

from __future__ import annotations

from typing import Any

import torch

from trial_ray.learner.connectors.collate_rows import CollateRows
from trial_ray.learner.connectors.group_advantages import GroupAdvantages
from trial_ray.learner.connectors.hindsight_views import HindsightViews
from trial_ray.learner.connectors.score_rows import ScoreRows
from trial_ray.learner.connectors.turn_weights import TurnWeights
from trial_ray.learner.grpo_learner import GRPOLearner
from trial_ray.learner.turn_rows import Columns, TokenBatch
from trial_ray.objectives.allocation import hindsight_gap
from trial_ray.objectives.losses import clamp_saturated, dense_hindsight_loss, joint_loss


class TRIALLearner(GRPOLearner):
    """Adds λ_g · L_dense, clamped to α · |L_GRPO|, to the outcome loss (Eq. 7, Eq. 8).

    The gap is refreshed against the current policy in the training forward itself: log π_T(y|h⁺) was cached by the scoring
    pass, so hindsight costs no additional training pass.
    """

    def connector_pieces(self) -> list[Any]:
        """Pieces from trajectory groups to the train batch, in order."""
        return [
            GroupAdvantages(self.config),
            HindsightViews(self.config),
            ScoreRows(self.config),
            TurnWeights(self.config, lambda: self.iteration),
            CollateRows(self.device),
        ]

    @property
    def coefficient(self) -> float:
        """λ_g: zero before ``hindsight_start_iteration``."""
        return self.config.hindsight_coeff if self.iteration >= self.config.hindsight_start_iteration else 0.0

    def compute_loss_for_module(
        self, *, module_id: str, config: Any, batch: Columns, fwd_out: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """Joint loss of one microbatch (Eq. 8)."""
        tokens = TokenBatch.from_columns(batch)
        outcome, surrogate = self.outcome_loss(tokens, fwd_out)
        gap = hindsight_gap(tokens.hindsight_logprobs, fwd_out["logprobs"], config.gap_clip)
        dense = dense_hindsight_loss(fwd_out["logprobs"], gap, tokens.weights, tokens.mask)
        loss = joint_loss(outcome, surrogate, dense, self.coefficient, config.clamp_alpha)
        saturated = clamp_saturated(surrogate, dense, self.coefficient, config.clamp_alpha)
        self.log_means(
            "trial",
            {
                "dense_loss": dense,
                "clamp_saturated_fraction": saturated.float(),
                "hindsight_coeff": torch.tensor(self.coefficient),
            },
        )
        return loss
