"""Skill-SD: GRPO plus λ times a self-distillation towards the policy that reads a skill, the k3 estimate of the reverse KL.

L = L_GRPO + λ mean(ρ_t (e^{−ℓ_t} − 1 + ℓ_t)), ℓ_t = log π_θ(y|h) − log π_T(y|h⁺), ρ_t = π_θ / π_old; both factors have a gradient.
Source: ``compute_sdl_loss``, github.com/ZJU-REAL/SDAR at 8b85c23. To train with it: ``--method skill_sd``.
"""

from __future__ import annotations

from torch import Tensor

from trial_ray.algorithms.grpo import GRPOConfig
from trial_ray.config.declare import setting
from trial_ray.learner.method import Method, Metrics, per_token
from trial_ray.learner.rows import TokenBatch, required
from trial_ray.objectives.losses import LOG_RATIO_BOUND
from trial_ray.objectives.segments import masked_mean, zero_outside

RATIO_BOUND = 10.0
"""Largest log ρ_t, in nats, as in the released code."""


class SkillDistillation(Method["SkillSDConfig"]):
    """Distils from the policy before the update with the skill in its prompt."""

    name = "skill_sd"
    needs_teacher_context = True

    def dense_coefficient(self, iteration: int) -> float:
        """Return λ."""
        return self.config.distillation_coeff

    @per_token
    def dense_loss(self, tokens: TokenBatch, fwd_out: dict[str, Tensor], iteration: int) -> tuple[Tensor, Metrics]:
        """Return the self-distillation as a token mean."""
        logprobs, mask = fwd_out["logprobs"], tokens.mask
        gap = zero_outside(logprobs - required(tokens.hindsight_logprobs), mask)
        ratio = zero_outside(logprobs - tokens.old_logprobs, mask).clamp(max=RATIO_BOUND).exp()
        dense = masked_mean(ratio * ((-gap).clamp(max=LOG_RATIO_BOUND).exp() - 1 + gap), mask)
        return dense, {"dense_loss": dense, "gap_mean": masked_mean(-gap.detach(), mask)}


class SkillSDConfig(GRPOConfig):
    """Skill-SD with the coefficient of its released scripts."""

    method_class = SkillDistillation

    teacher_context: str | None = setting("skill")
    distillation_coeff: float = setting(0.001, "λ, the weight of the self-distillation", at_least=0)


CONFIG = SkillSDConfig
