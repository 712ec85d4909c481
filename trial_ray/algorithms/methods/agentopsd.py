"""AgentOPSD: each turn's advantage is scaled by how it revises a belief in success, gathered turn by turn from hindsight.

Â_k = A_k · [(1 − λ) + λ w_k] with w_k = clip(1 + b sgn(A_k) z_k, 1 ± b), where z_k standardises ΔB_k over the trajectory,
B_k = σ(logit(B_0) + c_k), c_k = γ c_{k−1} + e_k, e_k = Σ_t log π_T(y|h⁺) − log π_old(y|h), and B_0 is the group's success rate.
Source: Wang et al., arXiv 2608.05987; ``compute_opsd_turn_advantage``, github.com/ZethWang/AgentOPSD at 0c478b2.
"""

from __future__ import annotations

import torch

from trial_ray.algorithms.config import GRPOConfig
from trial_ray.config.declare import setting
from trial_ray.learner.method import Method, Metrics
from trial_ray.learner.rows import TurnRows, required
from trial_ray.objectives.segments import segment_sum, zero_outside
from trial_ray.objectives.turn_credit import belief_revisions, revision_factors
from trial_ray.rollout.trajectory import TrajectoryGroup


class BeliefRevisions(Method["AgentOPSDConfig"]):
    """Factors are fixed once an iteration, from the scores of the policy before the update; GRPO's sign stays."""

    name = "agentopsd"
    needs_privileged_view = True
    needs_whole_groups = False

    def prepare(self, rows: TurnRows, groups: list[TrajectoryGroup], iteration: int) -> Metrics:
        """Scale the rows' advantages."""
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
    """Share of its group's survivors that succeeded, for each turn of all survivors, float64 ``[K]``."""
    rates = [
        sum(other.success for other in group.survivors) / len(group.survivors)
        for group in groups
        for trajectory in group.survivors
        for _ in trajectory.turns
    ]
    return torch.tensor(rates, dtype=torch.float64)


class AgentOPSDConfig(GRPOConfig):
    """AgentOPSD as released: skill text, scored by the policy before the update."""

    method_class = BeliefRevisions

    privileged_view: str | None = setting("skill")
    revision_mix: float = setting(0.5, "λ, the share of the factor in the advantage", within=(0, 1))
    revision_bound: float = setting(0.2, "b, the bound of the factor", within=(0, 1))
    belief_decay: float = setting(1.0, "γ, what is left of earlier turns' evidence after another turn", within=(0, 1))
