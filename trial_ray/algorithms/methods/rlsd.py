"""RLSD: the advantage of each token is rescaled by how the privileged view shifts its probability.

Â_t = A · [(1 − λ) + λ · clip(exp(sgn(A) · δ_t), 1 ± ε)], δ = log π_T(y|h⁺) − log π_old(y|h); nothing happens where A = 0.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from trial_ray.algorithms.grpo import GRPO
from trial_ray.algorithms.grpo_config import GRPOConfig
from trial_ray.learner.method import Method, Metrics, linear_decay
from trial_ray.learner.turn_rows import TokenBatch, TurnRows
from trial_ray.objectives.advantages import rescaled_advantages
from trial_ray.rollout.trajectory import TrajectoryGroup


class RescaledAdvantages(Method):
    """δ is frozen with the rollout's policy; λ falls linearly to 0."""

    name = "rlsd"

    def prepare(self, rows: TurnRows, groups: list[TrajectoryGroup], iteration: int) -> Metrics:
        """Log λ and the mean gap."""
        gap = rows.hindsight_logprobs - rows.logprobs
        return {"rescaling": torch.tensor(self.strength(iteration)), "gap_mean": gap.mean()}

    def strength(self, iteration: int) -> float:
        """λ of an iteration."""
        return linear_decay(self.config.rescaling, self.config.rescaling_iterations, iteration)

    def token_advantages(self, tokens: TokenBatch, logprobs: torch.Tensor, iteration: int) -> torch.Tensor:
        """Â of every token, ``[T]``."""
        gap = tokens.hindsight_logprobs - tokens.old_logprobs
        return rescaled_advantages(tokens.advantages, gap, self.strength(iteration), self.config.rescaling_clip)


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
        self._require_within(0, 1, "rescaling", "rescaling_clip")
        self._require_at_least(1, "rescaling_iterations")
        self._require_view()

    def schedules(self) -> dict[str, int]:
        """The iterations over which λ falls, unless λ is 0 throughout."""
        return {"rescaling_iterations": self.rescaling_iterations} if self.rescaling else {}


class RLSD(GRPO):
    """GRPO's loop."""

    @classmethod
    def get_default_config(cls) -> RLSDConfig:
        """Default configuration."""
        return RLSDConfig()


CONFIG = RLSDConfig
