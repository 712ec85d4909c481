"""ADRS: Â_t = A + η g q_t, with q_t the teacher's log-probability standardised within the turn, and g the gate of the group.

The released code divides η g q_t by its deviation in the group, which cancels a g above 0.02, and bounds the result. Source: arXiv
2608.03223; ``adrs_utils.py``, ``compute_grpo_outcome_advantage``, github.com/gitrxh/ADRS-arxiv at c4277ac.
"""

from __future__ import annotations

import torch

from trial_ray.algorithms.grpo import GRPOConfig
from trial_ray.config.declare import setting
from trial_ray.learner.advantages import anchor_ids, form_penalties
from trial_ray.learner.method import Method, Metrics
from trial_ray.learner.rows import TurnRows, required
from trial_ray.objectives.segments import standardise
from trial_ray.objectives.shaping import scaled_terms, teacher_gates, term_bounds
from trial_ray.trajectory import TrajectoryGroup


class ShapedAdvantages(Method["ADRSConfig"]):
    """Adds the terms η g q_t to advantages; they are computed before the update, and are 0 outside the configured iterations."""

    name, needs_teacher_context = "adrs", True

    def prepare(self, rows: TurnRows, groups: list[TrajectoryGroup], iteration: int) -> Metrics:
        """Compute the terms of the tokens, and log the mean gate."""
        config, owners, ids = self.config, rows.turn_ids, anchor_ids(groups, 0)
        outcomes = [rollout.outcome_reward(config.reward) for group in groups for rollout in group.completed]
        rewards = config.reward_scale * torch.tensor(outcomes, dtype=torch.float64)[rows.trajectory_ids]
        rewards, teacher = rewards - form_penalties(groups, config), required(rows.hindsight_logprobs).double()
        gates = teacher_gates(teacher, rows.mask, owners, rewards, ids, config.gate_slope)
        terms = config.shaping_coeff * gates[owners] * standardise(teacher, owners, len(rows), 1e-8, rows.mask)
        if config.standardise_in_group:
            bounds = term_bounds(rewards, ids, config.shaping_bound, config.advantage_epsilon)[owners]
            terms = (config.shaping_coeff * scaled_terms(terms, rows.mask, ids[owners])).clamp(-bounds, bounds)
        is_active = 0 <= iteration - config.shaping_start_iteration < config.shaping_iterations
        rows.terms = (is_active * terms).to(rows.logprobs.dtype)
        return {"gate_mean": gates.mean(), "term_size_mean": rows.terms.abs().mean()}


class ADRSConfig(GRPOConfig):
    """ADRS as released for ALFWorld; ``standardise_in_group=False`` is the formula of its README."""

    method_class = ShapedAdvantages

    teacher_context: str | None = setting("skill")
    shaping_coeff: float = setting(0.02, "η, the weight of the teacher's terms", at_least=0)
    shaping_start_iteration: int = setting(21, "first iteration (from 1) with the terms", at_least=1)
    shaping_iterations: int = setting(50, "iterations with the terms", at_least=1)
    standardise_in_group: bool = setting(True, "whether the terms are standardised in their group and bounded")
    shaping_bound: float = setting(0.2, "b, the bound in a group whose rewards differ as in the median group", above=0)
    gate_slope: float = setting(2.0, "τ, slope of the gate", at_least=0)

    def schedules(self) -> dict[str, int]:
        """Return the first iteration with the terms, unless they are always 0."""
        return {"shaping_start_iteration": self.shaping_start_iteration} if self.shaping_coeff else {}


CONFIG = ADRSConfig
