"""G2PO: a turn's advantage is its rollout's, plus two comparisons of the values of the observations before and after the turn.

A = A_episode + ω [norm_node(V(s') − p · invalid) + norm_task(V(s') − V(s))]. V(s) is the mean of γ^j R_i over the turns of the
task's group with observation s, with j turns to the end of rollout i, this one included; after the last turn V is R_i for a
success, else 0. Source: ``core_g2po.py``, github.com/Nala-YN/G2PO at 55d811a. To train with it: ``--method g2po``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trial_ray.algorithms.grpo import GRPOConfig
from trial_ray.config.declare import setting
from trial_ray.learner.advantages import anchor_ids, form_penalties, normalised_returns, step_returns, trajectory_ids_of
from trial_ray.learner.method import Method
from trial_ray.objectives.segments import segment_sum
from trial_ray.trajectory import TrajectoryGroup


class ValueGraph(Method["G2POConfig"]):
    """A node is an observation of a task's group; ``advantage_norm`` selects the released mode of all three terms."""

    name = "g2po"

    def advantages(self, groups: Sequence[TrajectoryGroup]) -> torch.Tensor:
        """Return the sum of the three terms for every turn."""
        config, nodes = self.config, anchor_ids(groups)
        rollouts = [rollout for group in groups for rollout in group.completed]
        turns, owners = [turn for rollout in rollouts for turn in rollout.turns], trajectory_ids_of(rollouts)
        discounted = (
            config.reward_scale * config.step_discount * step_returns(groups, config.reward, config.step_discount)
        )
        values = (segment_sum(discounted, nodes, len(turns)) / nodes.bincount(minlength=len(turns)).clamp(min=1))[nodes]
        ends = [config.reward_scale * rollout.outcome_reward(config.reward) * rollout.success for rollout in rollouts]
        is_last = torch.diff(owners, append=torch.tensor([-1])) != 0
        following = torch.where(is_last, torch.tensor(ends, dtype=torch.float64)[owners], values.roll(-1))
        compared = normalised_returns(following - form_penalties(groups, config), nodes, config)
        gains = normalised_returns(following - values, anchor_ids(groups, 0), config)
        return super().advantages(groups) + config.step_coeff * (compared + gains)


class G2POConfig(GRPOConfig):
    """G2PO as released; ``advantage_statistics="rows"`` gives the released statistics of the rollout's term."""

    method_class = ValueGraph

    step_coeff: float = setting(1.0, "ω, the weight of the two terms of a turn", at_least=0)
    step_discount: float = setting(0.95, "γ of a rollout's reward at an earlier turn", within=(0, 1))


CONFIG = G2POConfig
