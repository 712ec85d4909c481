"""HGPO: a turn's advantage is a weighted mean over nested groups of turns that share their last 1, 2, … observations.

A = Σ_k (k + 1)^α A_k / (Σ_k (k + 1)^α + ε). A_k compares a turn's return with those of the turns in its group with the
same last k observations; the sums are over each k for which there are at least two such turns.
Source: arXiv 2602.22817; ``core_hgpo.py`` in github.com/OliverLeeXZ/SERL at 5a2a85b and in gitrxh/ADRS-arxiv at c4277ac.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trial_ray.algorithms.grpo import GRPOConfig
from trial_ray.config.declare import setting
from trial_ray.learner.advantages import anchor_ids, form_penalties, step_returns
from trial_ray.learner.method import Method
from trial_ray.objectives.advantages import group_relative_advantages
from trial_ray.objectives.segments import standardise, zero_outside
from trial_ray.trajectory import TrajectoryGroup


class NestedGroups(Method["HGPOConfig"]):
    """Computes HGPO's advantages; with ``base_group``, the rollout's advantage is the term k = 0 of the weighted mean."""

    name, own_advantages = "hgpo", True

    def advantages(self, groups: Sequence[TrajectoryGroup]) -> torch.Tensor:
        """Return A, the weighted mean of A_k over k, for every turn."""
        config = self.config
        returns = config.reward_scale * step_returns(groups, config.reward, config.step_discount)
        returns = returns - form_penalties(groups, config)
        sums, weights = torch.zeros_like(returns), torch.full_like(returns, config.advantage_epsilon)
        for window in range(0 if config.base_group else 1, config.history_turns + 2):
            ids = anchor_ids(groups, window)
            own = self._relative(returns, ids) if window else super().advantages(groups)
            shared = (ids.bincount()[ids] > 1) | (window == 0)
            weight = (window + 1) ** config.length_exponent * (own != 0 if config.drop_zero_advantages else shared)
            sums, weights = sums + weight * own, weights + weight
        return sums / weights

    def _relative(self, returns: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return A_k: the return minus the group's mean, divided by the population deviation in the mode ``mean_std_norm``."""
        centred = group_relative_advantages(returns, ids, by_deviation=False)
        standard = zero_outside(standardise(centred, ids, len(ids), self.config.advantage_epsilon), centred != 0)
        return standard if self.config.advantage_norm == "mean_std_norm" else centred


class HGPOConfig(GRPOConfig):
    """HGPO as released for ALFWorld; ``drop_zero_advantages`` is on in SERL's file, and off in ADRS's file."""

    method_class = NestedGroups

    history_turns: int = setting(2, "past observations that turns of the smallest group share", at_least=0)
    length_exponent: float = setting(1.0, "α, exponent of a group's weight k + 1", at_least=0)
    base_group: bool = setting(False, "whether the rollout's advantage takes part with k = 0")
    drop_zero_advantages: bool = setting(True, "whether an A_k of 0 is left out of the weighted mean")
    step_discount: float = setting(0.95, "γ of the return from a turn on", within=(0, 1))


CONFIG = HGPOConfig
