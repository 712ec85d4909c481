"""RFT: rejection-sampling fine-tuning; rollouts whose reward reaches a threshold are imitated, and all others are ignored."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trial_ray.algorithms.grpo import GRPOConfig
from trial_ray.config.declare import setting
from trial_ray.learner.method import Method
from trial_ray.trajectory import TrajectoryGroup


class RejectionSampling(Method["RFTConfig"]):
    """Advantage 1 for every turn of a rollout with reward R_i ≥ ``reward_threshold``, else 0, in GRPO's clipped surrogate."""

    name = "rft"
    own_advantages = True

    def advantages(self, groups: Sequence[TrajectoryGroup]) -> Tensor:
        """Return 1 for the turns of accepted rollouts, else 0, float64 ``[K]``."""
        config = self.config
        accepted = [
            float(trajectory.outcome_reward(config.reward) >= config.reward_threshold)
            for group in groups
            for trajectory in group.completed
            for _ in trajectory.turns
        ]
        return torch.tensor(accepted, dtype=torch.float64)


class RFTConfig(GRPOConfig):
    """Rejection-sampling fine-tuning on the policy's own rollouts."""

    method_class = RejectionSampling

    reward_threshold: float = setting(1.0, "least reward R_i, before ``reward_scale``, of an imitated rollout")
