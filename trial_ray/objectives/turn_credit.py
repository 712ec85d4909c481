"""Factors of turns on their rollout's advantage: AgentOPSD's belief revisions, StepOPSD's equal steps."""

from __future__ import annotations

import torch
from torch import Tensor

from trial_ray.objectives.segments import flat_floats, flat_ids, flat_mask, renumber, segment_sum, zero_outside

LEAST_PRIOR = 1e-4
"""Nearest to 0 and 1 that AgentOPSD's prior may be, as released."""
LEAST_BELIEF = 1e-6
"""The same of its beliefs."""
EPSILON = 1e-6
"""Added to what is divided by, as released in both methods."""


def belief_revisions(evidence: Tensor, priors: Tensor, trajectory_ids: Tensor, decay: float) -> Tensor:
    """AgentOPSD's ΔB_k = B_k − B_{k−1}, with B_k = σ(logit(B_0) + c_k) and c_k = γ c_{k−1} + e_k.

    Args:
        evidence: float ``[K]``, e_k, the summed log-ratio of a turn's tokens; turns of a trajectory in their order.
        priors: float ``[K]``, B_0 of each turn's trajectory, bounded to [1e-4, 1 − 1e-4] here.
        trajectory_ids: integer ``[K]``, from 0.
        decay: γ, in [0, 1].

    Returns:
        Float ``[K]``, detached.

    Raises:
        ValueError: wrong shape or dtype, NaN, a negative id, or ``decay`` out of range.
    """
    evidence = flat_floats("evidence", evidence).detach()
    priors = (
        flat_floats("priors", priors, ("evidence", evidence)).clamp(LEAST_PRIOR, 1 - LEAST_PRIOR).to(evidence.dtype)
    )
    ids = flat_ids("trajectory_ids", trajectory_ids, ("evidence", evidence)).tolist()
    if not 0 <= decay <= 1:
        raise ValueError(f"decay must be in [0, 1], got {decay}")
    sums: list[float] = []
    before: list[int] = []
    last: dict[int, int] = {}
    for turn, (own, trajectory) in enumerate(zip(evidence.tolist(), ids, strict=True)):
        before.append(last.get(trajectory, -1))
        sums.append(own + (decay * sums[before[turn]] if before[turn] >= 0 else 0.0))
        last[trajectory] = turn
    beliefs = (priors.logit() + evidence.new_tensor(sums)).sigmoid().clamp(LEAST_BELIEF, 1 - LEAST_BELIEF)
    earlier = torch.tensor(before, dtype=torch.int64)
    return beliefs - torch.where(earlier >= 0, beliefs[earlier], priors)


def revision_factors(revisions: Tensor, advantages: Tensor, trajectory_ids: Tensor, bound: float) -> Tensor:
    """AgentOPSD's w_k = clip(1 + b · sgn(A_k) · z_k, 1 − b, 1 + b); z_k standardises a trajectory's revisions.

    Args:
        revisions: float ``[K]``, of :func:`belief_revisions`.
        advantages: float ``[K]``, A of each turn.
        trajectory_ids: integer ``[K]``, from 0.
        bound: b, in [0, 1].

    Returns:
        Float ``[K]``, detached; 1 in a trajectory of one turn.

    Raises:
        ValueError: wrong shape or dtype, NaN, a negative id, or ``bound`` out of range.
    """
    revisions = flat_floats("revisions", revisions).detach()
    advantages = flat_floats("advantages", advantages, ("revisions", revisions)).detach()
    if not 0 <= bound <= 1:
        raise ValueError(f"bound must be in [0, 1], got {bound}")
    trajectories, count = renumber(flat_ids("trajectory_ids", trajectory_ids, ("revisions", revisions)))
    sizes = segment_sum(torch.ones_like(revisions), trajectories, count)
    centred = revisions - (segment_sum(revisions, trajectories, count) / sizes)[trajectories]
    deviations = (segment_sum(centred.square(), trajectories, count) / sizes).sqrt()
    standard = centred / (deviations[trajectories] + EPSILON)
    return (1 + bound * advantages.sign() * standard).clamp(1 - bound, 1 + bound)


def equal_step_factors(magnitudes: Tensor, active: Tensor, trajectory_ids: Tensor, bound: float = 2.0) -> Tensor:
    """StepOPSD's factor of each step: its trajectory's mean magnitude over its own, within [1 / c, c].

    Args:
        magnitudes: float ``[K]``, mean |Â| over the action tokens of each turn.
        active: bool ``[K]``, turns that have action tokens; the others, and one that is alone, get 1.
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
