"""Uniform: TRIAL's dense loss with every turn weighing one, the controlled study's profile without allocation."""

from __future__ import annotations

import torch

from trial_ray.algorithms.methods.trial import TrajectoryRelative, TRIALConfig
from trial_ray.objectives.allocation import uniform_weights


class UnitProfile(TrajectoryRelative):
    """w_k = 1 for every turn with eligible tokens."""

    def allocate(
        self, scores: torch.Tensor, counts: torch.Tensor, trajectory_ids: torch.Tensor, iteration: int
    ) -> torch.Tensor:
        """Turn weights ``[K]``."""
        return uniform_weights(scores, counts, trajectory_ids)


class UniformConfig(TRIALConfig):
    """TRIAL's settings and defaults."""

    method_class = UnitProfile


CONFIG = UniformConfig
