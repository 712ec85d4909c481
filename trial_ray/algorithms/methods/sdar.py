"""SDAR: every sampled token is reinforced with the weight μ · σ(β δ_t), which grows with the teacher's log-ratio δ_t."""

from __future__ import annotations

import torch

from trial_ray.algorithms.grpo import GRPOConfig
from trial_ray.config.declare import setting
from trial_ray.errors import ConfigError
from trial_ray.learner.method import Method, Metrics, per_token
from trial_ray.learner.rows import TokenBatch, required
from trial_ray.objectives.losses import weighted_likelihood_loss
from trial_ray.objectives.segments import masked_mean


class GatedLikelihood(Method["SDARConfig"]):
    """The dense loss is −mean(gate · log π_θ) with the positive gate σ(β δ), δ = log π_T(y|h⁺) − sg log π_θ(y|h)."""

    name = "sdar"
    needs_teacher_context = True

    def dense_coefficient(self, iteration: int) -> float:
        """Return μ, the setting ``distillation_coeff``."""
        return self.config.distillation_coeff

    @per_token
    def dense_loss(
        self, tokens: TokenBatch, fwd_out: dict[str, torch.Tensor], iteration: int
    ) -> tuple[torch.Tensor, Metrics]:
        """Return −mean(gate · log π_θ) over the tokens."""
        logprobs = fwd_out["logprobs"]
        gap = required(tokens.hindsight_logprobs) - logprobs.detach()
        gate = torch.sigmoid(self.config.gate_slope * gap)
        dense = weighted_likelihood_loss(logprobs, gate, tokens.mask)
        return dense, {
            "dense_loss": dense,
            "gate_mean": masked_mean(gate, tokens.mask),
            "gap_mean": masked_mean(gap, tokens.mask),
        }


class SDARConfig(GRPOConfig):
    """SDAR with the settings of its released code: the teacher is the policy with advice on the task in its prompt."""

    method_class = GatedLikelihood

    teacher_context: str | None = setting("skill")
    distillation_coeff: float = setting(0.01, "μ, the weight of the gated likelihood", at_least=0)
    gate_slope: float = setting(5.0, "β, slope of the gate; with 0 the gate is ½ for every token", at_least=0)


class GRPOOPSDConfig(SDARConfig):
    """GRPO+OPSD as in SDAR's released code: the gate's slope is 0, so every token has the weight μ/2, μ = ``distillation_coeff``.

    The teacher's log-probabilities are computed and logged, but **they do not reach the gradient**: σ(0 · δ) = ½ for any δ.
    """

    gate_slope: float = setting(0.0)

    def validate(self) -> None:
        """Check every value; see ``GRPOConfig.validate``."""
        super().validate()
        if self.gate_slope != 0:
            raise ConfigError(f"gate_slope is {self.gate_slope}, but GRPO+OPSD as released is SDAR with 0; use sdar.")
