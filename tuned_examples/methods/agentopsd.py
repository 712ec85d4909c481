"""AgentOPSD: each turn's advantage is scaled by its revision of a belief in success, which accumulates hindsight log-ratios.

Â_k = A_k · [(1 − λ) + λ w_k] with w_k = clip(1 + b sgn(A_k) z_k, 1 ± b), where z_k standardises ΔB_k over the trajectory,
B_k = σ(logit(B_0) + c_k), c_k = γ c_{k−1} + e_k, e_k = Σ_t log π_T(y|h⁺) − log π_old(y|h), and B_0 is the group's success rate.
Source: Wang et al., arXiv 2608.05987; ``compute_opsd_turn_advantage``, github.com/ZethWang/AgentOPSD at 0c478b2.
To train with it: ``--method agentopsd``.
"""

from __future__ import annotations

import torch

from trial_ray.algorithms.grpo import GRPOConfig
from trial_ray.config.declare import setting
from trial_ray.learner.method import Method, Metrics
from trial_ray.learner.rows import TurnRows, required
from trial_ray.objectives.segments import flat_floats, flat_ids, renumber, segment_sum, standardise, zero_outside
from trial_ray.trajectory import TrajectoryGroup

MIN_PRIOR = 1e-4
"""Minimum distance of the prior from 0 and 1, as in AgentOPSD's released code."""
MIN_BELIEF = 1e-6
"""Minimum distance of a belief from 0 and 1, as in AgentOPSD's released code."""
EPSILON = 1e-6
"""Number added to denominators, as in AgentOPSD's released code."""


class BeliefRevisions(Method["AgentOPSDConfig"]):
    """Scales GRPO's advantages once per iteration, by log-probabilities of the policy before the update; signs do not change."""

    name = "agentopsd"
    needs_teacher_context = True

    def prepare(self, rows: TurnRows, groups: list[TrajectoryGroup], iteration: int) -> Metrics:
        """Scale the advantages of ``rows``, and return statistics of the factors."""
        config = self.config
        gap = (required(rows.hindsight_logprobs) - rows.logprobs).to(rows.advantages.dtype)
        evidence = segment_sum(zero_outside(gap, rows.mask), rows.turn_ids, len(rows))
        revisions = belief_revisions(evidence, success_rates(groups), rows.trajectory_ids, config.belief_decay)
        factors = revision_factors(revisions, rows.advantages, rows.trajectory_ids, config.revision_bound)
        rows.advantages = rows.advantages * ((1 - config.revision_mix) + config.revision_mix * factors)
        return {
            "gap_mean": gap.mean(),
            "revision_mean": revisions.abs().mean(),
            "factor_std": factors.std(correction=0),
        }


def success_rates(groups: list[TrajectoryGroup]) -> torch.Tensor:
    """Return the success rate of each turn's group, float64 ``[K]``; only completed rollouts and their K turns count."""
    rates = [
        sum(other.success for other in group.completed) / len(group.completed)
        for group in groups
        for trajectory in group.completed
        for _ in trajectory.turns
    ]
    return torch.tensor(rates, dtype=torch.float64)


def belief_revisions(
    evidence: torch.Tensor, priors: torch.Tensor, trajectory_ids: torch.Tensor, decay: float
) -> torch.Tensor:
    """AgentOPSD's ΔB_k = B_k − B_{k−1}, with B_k = σ(logit(B_0) + c_k) and c_k = γ c_{k−1} + e_k.

    Args:
        evidence: float ``[K]``, e_k, the summed log-ratio of a turn's tokens; turns of a trajectory in their order.
        priors: float ``[K]``, B_0 of each turn's trajectory, which this function clamps to [1e-4, 1 − 1e-4].
        trajectory_ids: integer ``[K]``, from 0.
        decay: γ, in [0, 1].

    Returns:
        Float ``[K]``, detached.

    Raises:
        ValueError: wrong shape or dtype, NaN, a negative id, or ``decay`` out of range.
    """
    evidence = flat_floats("evidence", evidence).detach()
    priors = flat_floats("priors", priors, ("evidence", evidence)).clamp(MIN_PRIOR, 1 - MIN_PRIOR).to(evidence.dtype)
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
    beliefs = (priors.logit() + evidence.new_tensor(sums)).sigmoid().clamp(MIN_BELIEF, 1 - MIN_BELIEF)
    earlier = torch.tensor(before, dtype=torch.int64)
    return beliefs - torch.where(earlier >= 0, beliefs[earlier], priors)


def revision_factors(
    revisions: torch.Tensor, advantages: torch.Tensor, trajectory_ids: torch.Tensor, bound: float
) -> torch.Tensor:
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
    standard = standardise(revisions, trajectories, count, EPSILON)
    return (1 + bound * advantages.sign() * standard).clamp(1 - bound, 1 + bound)


class AgentOPSDConfig(GRPOConfig):
    """AgentOPSD as released: skill text, scored by the policy before the update."""

    method_class = BeliefRevisions

    teacher_context: str | None = setting("skill")
    revision_mix: float = setting(0.5, "λ, the share of the factor in the advantage", within=(0, 1))
    revision_bound: float = setting(0.2, "b, the bound of the factor", within=(0, 1))
    belief_decay: float = setting(1.0, "γ, decay per turn of accumulated evidence", within=(0, 1))


CONFIG = AgentOPSDConfig
