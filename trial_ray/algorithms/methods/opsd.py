"""OPSD: no reward; the policy is drawn towards what it would itself have said with the privileged text in view.

``divergence="jsd"`` minimises the full-vocabulary generalised Jensen-Shannon divergence between π_θ(·|h) and π_T(·|h⁺) along the
sampled response; ``"sampled"`` uses the sampled tokens alone, with c_t = δ_t (a reverse-KL gradient).
"""

from __future__ import annotations

from typing import ClassVar

import torch

from trial_ray.algorithms.grpo import GRPO
from trial_ray.algorithms.grpo_config import GRPOConfig
from trial_ray.errors import ConfigError
from trial_ray.learner.method import Method, Metrics
from trial_ray.learner.turn_rows import TokenBatch
from trial_ray.objectives.losses import weighted_likelihood_loss
from trial_ray.objectives.segments import masked_mean

DIVERGENCES = ("jsd", "sampled")


class SelfDistillation(Method):
    """Â = 0. π_T is the lagged teacher where there is one; else, for ``jsd``, the policy itself without a gradient, and for
    ``sampled`` the policy before the update.
    """

    name = "opsd"

    @property
    def needs_divergence(self) -> bool:  # type: ignore[override]
        """Only the full-vocabulary form scores the hindsight view in the training forward."""
        return self.config.divergence == "jsd"

    def token_advantages(self, tokens: TokenBatch, logprobs: torch.Tensor, iteration: int) -> torch.Tensor:
        """0 for every token."""
        return torch.zeros_like(tokens.advantages)

    def dense_loss(
        self, tokens: TokenBatch, fwd_out: dict[str, torch.Tensor], iteration: int
    ) -> tuple[torch.Tensor, Metrics]:
        """The divergence, a token mean."""
        if self.config.divergence == "jsd":
            dense = masked_mean(fwd_out["divergence"], tokens.mask)
        else:
            logprobs = fwd_out["logprobs"]
            dense = weighted_likelihood_loss(logprobs, tokens.hindsight_logprobs - logprobs.detach(), tokens.mask)
        return dense, {"dense_loss": dense}


class OPSDConfig(GRPOConfig):
    """On-policy self-distillation; the settings are those of the original.

    Attributes:
        divergence: ``"jsd"`` or ``"sampled"``.
        jsd_mix: β of the generalised JSD, the teacher's share in the mixture; in (0, 1).
        jsd_temperature: divides both views' logits.
    """

    method_class: ClassVar[type[Method]] = SelfDistillation

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class or OPSD)
        self.privileged_view = "solution"
        self.kl_coeff = 0.0
        self.entropy_coeff = 0.0
        self.divergence = "jsd"
        self.jsd_mix = 0.5
        self.jsd_temperature = 1.1

    def validate(self) -> None:
        """Check every value; see ``GRPOConfig.validate``."""
        super().validate()
        self._require_one_of("divergence", DIVERGENCES)
        if not 0 < self.jsd_mix < 1:
            raise ConfigError(f"jsd_mix is {self.jsd_mix}, expected a value in (0, 1).")
        self._require_above(0, "jsd_temperature")
        self._require_view()


class OPSD(GRPO):
    """GRPO's loop."""

    @classmethod
    def get_default_config(cls) -> OPSDConfig:
        """Default configuration."""
        return OPSDConfig()


CONFIG = OPSDConfig
