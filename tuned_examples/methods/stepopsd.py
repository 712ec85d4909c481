"""StepOPSD: action tokens' advantages are rescaled by a stale teacher that has seen a successful rollout; steps have equal weight.

On action tokens Â_t = f_k A [(1 − λ) + λ clip(2 σ(sgn(A) δ_t), 1 ± α)], δ = log π_T(y|h⁺) − log π_old(y|h); f_k, within
[1/2, 2], scales the mean |Â| of a step to the mean over all steps of the trajectory. Other tokens keep A. To train with it:
``--method stepopsd``. Source: Zhang et al., arXiv 2605.27140; ``compute_advantage``,
github.com/yanfei-zhang-95/OPSD_experiment_SearchR1 at 79c114c.
"""

from __future__ import annotations

import torch

from trial_ray.algorithms.methods.rlsd import RescaledAdvantages, RLSDConfig
from trial_ray.config.declare import setting
from trial_ray.learner.method import Metrics, per_token
from trial_ray.learner.rows import TokenBatch, TurnRows, required
from trial_ray.objectives.advantages import rescaled_advantages
from trial_ray.objectives.segments import flat_floats, flat_ids, flat_mask, renumber, segment_sum, zero_outside
from trial_ray.trajectory import TrajectoryGroup

EPSILON = 1e-6
"""Number added to denominators, as in StepOPSD's released code."""


class EqualSteps(RescaledAdvantages):
    """δ uses the scores of the policy before the update; λ falls linearly to 0, as in RLSD."""

    name = "stepopsd"
    needs_action_spans = True

    def prepare(self, rows: TurnRows, groups: list[TrajectoryGroup], iteration: int) -> Metrics:
        """Compute the factors of the steps, and log their deviation."""
        actions, dtype = required(rows.action_mask) & rows.mask, rows.logprobs.dtype
        gap = required(rows.hindsight_logprobs) - rows.logprobs
        shaped = self._shaped(rows.advantages.to(dtype)[rows.turn_ids], gap, iteration)
        lengths = segment_sum(actions.to(dtype), rows.turn_ids, len(rows))
        magnitudes = segment_sum(zero_outside(shaped.abs(), actions), rows.turn_ids, len(rows)) / lengths.clamp(min=1)
        rows.weights = equal_step_factors(magnitudes, lengths > 0, rows.trajectory_ids)
        return super().prepare(rows, groups, iteration) | {"step_factor_std": rows.weights.std(correction=0)}

    @per_token
    def token_advantages(self, tokens: TokenBatch, logprobs: torch.Tensor, iteration: int) -> torch.Tensor:
        """Return Â of every token, ``[T]``."""
        gap = required(tokens.hindsight_logprobs) - tokens.old_logprobs
        shaped = self._shaped(tokens.advantages, gap, iteration) * required(tokens.weights)
        return torch.where(required(tokens.action_mask), shaped, tokens.advantages)

    def _shaped(self, advantages: torch.Tensor, gap: torch.Tensor, iteration: int) -> torch.Tensor:
        """Return the advantages ``[T]`` before the factors of the steps."""
        return rescaled_advantages(advantages, gap, self.strength(iteration), self.config.rescaling_clip, logistic=True)


def equal_step_factors(
    magnitudes: torch.Tensor, active: torch.Tensor, trajectory_ids: torch.Tensor, bound: float = 2.0
) -> torch.Tensor:
    """StepOPSD's factor of each step: the trajectory's mean magnitude divided by the step's, within [1 / c, c].

    Args:
        magnitudes: float ``[K]``, mean |Â| over the action tokens of each turn.
        active: bool ``[K]``, turns that have action tokens; other turns, and a trajectory's only active turn, get factor 1.
        trajectory_ids: integer ``[K]``, from 0.
        bound: c, at least 1.

    Returns:
        Float ``[K]``, detached.

    Raises:
        ValueError: wrong shape or dtype, NaN, a negative id, or ``bound`` below 1.
    """
    magnitudes = flat_floats("magnitudes", magnitudes).detach()
    active = flat_mask("active", active, ("magnitudes", magnitudes))
    if not bound >= 1:
        raise ValueError(f"bound must be at least 1, got {bound}")
    trajectories, count = renumber(flat_ids("trajectory_ids", trajectory_ids, ("magnitudes", magnitudes)))
    steps = segment_sum(active.to(magnitudes.dtype), trajectories, count)
    means = segment_sum(zero_outside(magnitudes, active), trajectories, count) / steps.clamp(min=1)
    factors = (means[trajectories] / (magnitudes + EPSILON)).clamp(1 / bound, bound)
    return torch.where(active & (steps[trajectories] > 1), factors, torch.ones_like(factors))


class StepOPSDConfig(RLSDConfig):
    """StepOPSD: α is 0.2, λ falls from 0.2 to 0 over 50 iterations, and the teacher is renewed every 10; settings as in RLSD."""

    method_class = EqualSteps

    teacher_context: str | None = setting("peer")
    teacher_sync_iterations: int | None = setting(10)
    rescaling: float = setting(0.2)
    rescaling_iterations: int = setting(50)


CONFIG = StepOPSDConfig
