"""GiGPO: adds a step advantage, which compares turns of a group that started from the same observation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trial_ray.algorithms.grpo import GRPOConfig
from trial_ray.config.declare import setting
from trial_ray.learner.advantages import anchor_ids, form_penalties, normalised_returns, step_returns
from trial_ray.learner.method import Method, Metrics
from trial_ray.learner.rows import TurnRows
from trial_ray.trajectory import TrajectoryGroup


class StepGroups(Method["GiGPOConfig"]):
    """Â = A_episode + ω · A_step: GRPO's advantage plus ω (``step_coeff``) times the step advantage.

    A_step compares the returns of those turns in a group that start from the same observation, called an anchor.
    ``advantage_norm`` selects the normalisation of both terms.
    """

    name = "gigpo"

    def advantages(self, groups: Sequence[TrajectoryGroup]) -> torch.Tensor:
        """Return the rollouts' advantages plus ω times the step advantages."""
        return super().advantages(groups) + self.config.step_coeff * self._step_advantages(groups)

    def _step_advantages(self, groups: Sequence[TrajectoryGroup]) -> torch.Tensor:
        config = self.config
        returns = config.reward_scale * step_returns(groups, config.reward, config.step_discount)
        if config.advantage_statistics == "rows":
            returns = returns - form_penalties(groups, config)
        return normalised_returns(returns, anchor_ids(groups), config)

    def prepare(self, rows: TurnRows, groups: list[TrajectoryGroup], iteration: int) -> Metrics:
        """Log the standard deviation of the step advantages, and the fraction of turns whose observation another turn shares."""
        anchors = anchor_ids(groups)
        # A turn shares its observation if more than one turn has the same anchor id.
        shared = anchors.bincount()[anchors] > 1
        return {
            "step_advantage_std": self._step_advantages(groups).std(correction=0),
            "shared_anchor_fraction": shared.float().mean(),
        }


class GiGPOConfig(GRPOConfig):
    """GiGPO with its authors' normalisation for ALFWorld; for WebShop they use ``advantage_norm="mean_norm"``."""

    method_class = StepGroups

    step_coeff: float = setting(1.0, "ω, the weight of the step advantage", at_least=0)
    step_discount: float = setting(0.95, "γ of the return from a step on", within=(0, 1))
