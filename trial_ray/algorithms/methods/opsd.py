"""OPSD: on-policy self-distillation, without a reward. The teacher is the policy itself or ``teacher_model``.

The policy π_θ has the prompt h; the teacher π_T has the prompt h⁺, which also contains the teacher context. ``divergence="jsd"``
minimises the full-vocabulary generalised Jensen-Shannon divergence between π_θ(·|h) and π_T(·|h⁺) along the sampled response.
``"sampled"`` weights the log-likelihood of each sampled token by log π_T(y|h⁺) − log π_θ(y|h), which gives a reverse-KL gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trial_ray.algorithms.grpo import GRPOConfig
from trial_ray.config.declare import setting
from trial_ray.learner.method import Divergence, Method, Metrics, per_token
from trial_ray.learner.rows import TokenBatch, required
from trial_ray.objectives.losses import weighted_likelihood_loss
from trial_ray.objectives.segments import masked_mean

DIVERGENCES = ("jsd", "sampled")


class SelfDistillation(Method["OPSDConfig"]):
    """Every advantage is 0, and the loss is the divergence from the teacher's distribution π_T.

    π_T is the teacher model or, with ``teacher_sync_iterations``, an older copy of the policy. Otherwise, π_T is the policy itself
    without a gradient for ``jsd``, and the policy before the update for ``sampled``.
    """

    name = "opsd"
    own_advantages = True
    needs_teacher_context = True

    @property
    def divergence(self) -> Divergence | None:
        """Divergence over the full vocabulary; ``None`` if the loss uses only the sampled tokens."""
        config = self.config
        return Divergence(config.jsd_mix, config.jsd_temperature) if config.divergence == "jsd" else None

    @per_token
    def token_advantages(self, tokens: TokenBatch, logprobs: Tensor, iteration: int) -> Tensor:
        """Return 0 for every token."""
        return torch.zeros_like(tokens.advantages)

    @per_token
    def dense_loss(self, tokens: TokenBatch, fwd_out: dict[str, Tensor], iteration: int) -> tuple[Tensor, Metrics]:
        """Return the distillation loss as a token mean."""
        if self.divergence:
            dense = masked_mean(fwd_out["divergence"], tokens.mask)
        else:
            logprobs = fwd_out["logprobs"]
            gap = required(tokens.hindsight_logprobs) - logprobs.detach()
            dense = weighted_likelihood_loss(logprobs, gap, tokens.mask)
        return dense, {"dense_loss": dense}


class OPSDConfig(GRPOConfig):
    """On-policy self-distillation, with the settings of OPSD's authors."""

    method_class = SelfDistillation

    teacher_context: str | None = setting("solution")
    ref_kl_coeff: float = setting(0.0)
    entropy_coeff: float = setting(0.0)
    divergence: str = setting(
        "jsd", '``"jsd"``: of whole distributions; ``"sampled"``: of sampled tokens', one_of=DIVERGENCES
    )
    jsd_mix: float = setting(
        0.5,
        "β of the generalised JSD, the teacher's share in the mixture; 1: KL(π_θ ‖ π_T), 0: KL(π_T ‖ π_θ)",
        within=(0, 1),
    )
    jsd_temperature: float = setting(1.1, "divides both views' logits", above=0)
