"""SERL: RLSD's rescaling of advantages, for the action's tokens only; the teacher is an older copy of the policy.

The teacher's prompt h⁺ also contains the next observation. δ = log π_T(y|h⁺) − sg log π_θ(y|h) is computed with the current policy
and bounded to ±20 before exp. Tokens outside the action keep their advantage A.
"""

from __future__ import annotations

import torch

from trial_ray.algorithms.methods.rlsd import RescaledAdvantages, RLSDConfig
from trial_ray.config.declare import setting
from trial_ray.learner.method import Metrics, linear_decay, per_token
from trial_ray.learner.rows import TokenBatch, TurnRows, required
from trial_ray.objectives.advantages import rescaled_advantages
from trial_ray.trajectory import TrajectoryGroup


class ActionRescaling(RescaledAdvantages):
    """Rescales the advantages of action tokens; the teacher is a copy of the policy, see ``teacher_sync_iterations``."""

    name = "serl"
    needs_action_spans = True

    def prepare(self, rows: TurnRows, groups: list[TrajectoryGroup], iteration: int) -> Metrics:
        """Rescale only turns with a non-empty ``outcome``, the environment's answer; also log the fraction of rescaled tokens."""
        answered = torch.tensor([bool(turn.outcome.strip()) for turn in rows.turns])
        rows.action_mask = required(rows.action_mask) & answered[rows.turn_ids]
        fraction = required(rows.action_mask).float().mean()
        return super().prepare(rows, groups, iteration) | {"action_token_fraction": fraction}

    def strength(self, iteration: int) -> float:
        """Return the rescaling strength λ; as in SERL's released code, iteration 1 uses the initial value."""
        return linear_decay(self.config.rescaling, self.config.rescaling_iterations, iteration)

    @per_token
    def token_advantages(self, tokens: TokenBatch, logprobs: torch.Tensor, iteration: int) -> torch.Tensor:
        """Return the advantage Â of every token, ``[T]``; only advantages of tokens in ``tokens.action_mask`` are rescaled."""
        gap = required(tokens.hindsight_logprobs) - logprobs
        rescaled = rescaled_advantages(tokens.advantages, gap, self.strength(iteration), self.config.rescaling_clip)
        return torch.where(required(tokens.action_mask), rescaled, tokens.advantages)


class SERLConfig(RLSDConfig):
    """RLSD's settings, changed to those of SERL's released code: no KL term, and λ decreases from 0.5 to 0 over 50 iterations."""

    method_class = ActionRescaling

    teacher_context: str | None = setting("feedback")
    teacher_sync_iterations: int | None = setting(10)
    rescaling_iterations: int = setting(50)
    ref_kl_coeff: float = setting(0.0)
