"""RLSD: the advantage of each token is rescaled by how the privileged view shifts its probability.

Â_t = A · [(1 − λ) + λ · clip(exp(sgn(A) · δ_t), 1 ± ε)], δ = log π_T(y|h⁺) − log π_old(y|h); nothing happens where A = 0.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from trial_ray.algorithms.grpo import GRPO
from trial_ray.algorithms.grpo_config import GRPOConfig
from trial_ray.learner.method import Method, linear_decay
from trial_ray.learner.turn_rows import TokenBatch
from trial_ray.objectives.advantages import rescaled_advantages


class RescaledAdvantages(Method):
    """δ is frozen with the rollout's policy; λ falls linearly to 0."""

    name = "rlsd"

    def token_advantages(self, tokens: TokenBatch, logprobs: torch.Tensor, iteration: int) -> torch.Tensor:
        """Â of every token, ``[T]``."""
        config = self.config
        strength = linear_decay(config.rescaling, config.rescaling_iterations, iteration)
        gap = tokens.hindsight_logprobs - tokens.old_logprobs
        return rescaled_advantages(tokens.advantages, gap, strength, config.rescaling_clip)


class RLSDConfig(GRPOConfig):
    """RLSD as released: skill text, scored by the policy before the update.

    Attributes:
        rescaling: λ in the first iteration.
        rescaling_iterations: iterations after which λ is 0.
        rescaling_clip: ε.
    """

    method_class: ClassVar[type[Method]] = RescaledAdvantages

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class or RLSD)
        self.privileged_view = "skill"
        self.rescaling = 0.5
        self.rescaling_iterations = 100
        self.rescaling_clip = 0.2

    def validate(self) -> None:
        """Check every value; see ``GRPOConfig.validate``."""
        super().validate()
        self._require_at_least(0, "rescaling", "rescaling_clip")
        self._require_at_least(1, "rescaling_iterations")
        self._require_view()


class RLSD(GRPO):
    """GRPO's loop."""

    @classmethod
    def get_default_config(cls) -> RLSDConfig:
        """Default configuration."""
        return RLSDConfig()


CONFIG = RLSDConfig
