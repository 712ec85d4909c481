"""SERL: RLSD's rescaling on the action's tokens alone, by what a lagged teacher thinks once it has seen the next observation.

δ = log π_T(y|h⁺) − sg log π_θ(y|h) follows the current policy, bounded to ±20 before exp; the other tokens keep A.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from trial_ray.algorithms.methods.rlsd import RLSD, RescaledAdvantages, RLSDConfig
from trial_ray.learner.method import Method, Metrics
from trial_ray.learner.turn_rows import TokenBatch, TurnRows
from trial_ray.objectives.advantages import rescaled_advantages
from trial_ray.rollout.trajectory import TrajectoryGroup

EXPONENT_BOUND = 20.0


class ActionRescaling(RescaledAdvantages):
    """The teacher is a copy of the policy that is renewed every ``teacher_sync_iterations``."""

    name = "serl"
    needs_action_spans = True

    def prepare(self, rows: TurnRows, groups: list[TrajectoryGroup], iteration: int) -> Metrics:
        """Log the share of tokens that are rescaled too."""
        return super().prepare(rows, groups, iteration) | {"action_token_fraction": rows.action_mask.float().mean()}

    def token_advantages(self, tokens: TokenBatch, logprobs: torch.Tensor, iteration: int) -> torch.Tensor:
        """Â of every token, ``[T]``."""
        gap = (tokens.hindsight_logprobs - logprobs).clamp(-EXPONENT_BOUND, EXPONENT_BOUND)
        rescaled = rescaled_advantages(tokens.advantages, gap, self.strength(iteration), self.config.rescaling_clip)
        return torch.where(tokens.action_mask, rescaled, tokens.advantages)


class SERLConfig(RLSDConfig):
    """SERL as released: no KL term, λ 0.5 → 0 over 50 iterations; settings as RLSD's."""

    method_class: ClassVar[type[Method]] = ActionRescaling

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class or SERL)
        self.privileged_view = "feedback"
        self.teacher_sync_iterations = 10
        self.rescaling_iterations = 50
        self.kl_coeff = 0.0


class SERL(RLSD):
    """GRPO's loop."""

    @classmethod
    def get_default_config(cls) -> SERLConfig:
        """Default configuration."""
        return SERLConfig()


CONFIG = SERLConfig
