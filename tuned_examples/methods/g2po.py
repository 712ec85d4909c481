"""G2PO: a turn's advantage is that of its rollout, plus two comparisons of the values of the observations around the turn.

A = A_episode + ω [norm_node(V(s') − p · invalid) + norm_task(V(s') − V(s))]. V(s) is the mean of γ^j R_i over the turns with
observation s in the task's group, where j counts the turns of rollout i from that turn to the last, both included. After the last
turn, V is R_i if rollout i succeeded, else 0. To train with it: ``--method g2po``. Source:
``core_g2po.py``, github.com/Nala-YN/G2PO at 55d811a.
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
    """Computes G2PO's advantages; a node is an observation of a task's group, and ``advantage_norm`` applies to all terms."""

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
    """G2PO as released; set ``advantage_statistics="rows"`` to also normalise the rollout's term over turns, as released."""

    method_class = ValueGraph

    step_coeff: float = setting(1.0, "ω, the weight of the two terms of a turn", at_least=0)
    step_discount: float = setting(0.95, "γ of a rollout's reward at an earlier turn", within=(0, 1))


CONFIG = G2POConfig
