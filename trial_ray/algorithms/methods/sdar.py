"""SDAR: every sampled token is reinforced, the more so the more the privileged view prefers it: c_t = μ · σ(β δ_t)."""

from __future__ import annotations

from typing import ClassVar

import torch

from trial_ray.algorithms.grpo import GRPO
from trial_ray.algorithms.grpo_config import GRPOConfig
from trial_ray.learner.method import Method, Metrics
from trial_ray.learner.turn_rows import TokenBatch
from trial_ray.objectives.losses import weighted_likelihood_loss
from trial_ray.objectives.segments import masked_mean


class GatedLikelihood(Method):
    """δ = log π_T(y|h⁺) − sg log π_θ(y|h). The gate is positive: no token's probability is ever pushed down by it."""

    name = "sdar"

    def dense_coefficient(self, iteration: int) -> float:
        """μ."""
        return self.config.distillation_coeff

    def dense_loss(
        self, tokens: TokenBatch, fwd_out: dict[str, torch.Tensor], iteration: int
    ) -> tuple[torch.Tensor, Metrics]:
        """−mean of the gate times log π_θ."""
        logprobs = fwd_out["logprobs"]
        gap = tokens.hindsight_logprobs - logprobs.detach()
        gate = torch.sigmoid(self.config.gate_slope * gap)
        dense = weighted_likelihood_loss(logprobs, gate, tokens.mask)
        return dense, {
            "dense_loss": dense,
            "gate_mean": masked_mean(gate, tokens.mask),
            "gap_mean": masked_mean(gap, tokens.mask),
        }


class SDARConfig(GRPOConfig):
    """SDAR as released: skill text, scored by the policy before the update.

    Attributes:
        distillation_coeff: μ.
        gate_slope: β; 0 leaves every token half of μ.
    """

    method_class: ClassVar[type[Method]] = GatedLikelihood

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class or SDAR)
        self.privileged_view = "skill"
        self.distillation_coeff = 0.01
        self.gate_slope = 5.0

    def validate(self) -> None:
        """Check every value; see ``GRPOConfig.validate``."""
        super().validate()
        self._require_at_least(0, "distillation_coeff", "gate_slope")
        self._require_view()


class SDAR(GRPO):
    """GRPO's loop."""

    @classmethod
    def get_default_config(cls) -> SDARConfig:
        """Default configuration."""
        return SDARConfig()


CONFIG = SDARConfig
