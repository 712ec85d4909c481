"""Permuted: TRIAL's turn weights dealt out to other turns of the same trajectory, the controlled study's null profile."""

from __future__ import annotations

import torch

from trial_ray.algorithms.methods.trial import TrajectoryRelative, TRIALConfig
from trial_ray.objectives.allocation import permuted_weights
from trial_ray.rollout.episode import derive_seed


class PermutedProfile(TrajectoryRelative):
    """No active turn keeps its own weight; the token-weighted mean of one is restored."""

    def allocate(
        self, scores: torch.Tensor, counts: torch.Tensor, trajectory_ids: torch.Tensor, iteration: int
    ) -> torch.Tensor:
        """Turn weights ``[K]``."""
        # Seeded by the iteration, so that a resumed run permutes as an uninterrupted one does.
        generator = torch.Generator().manual_seed(derive_seed("permuted", self.config.seed or 0, iteration))
        return permuted_weights(scores, counts, trajectory_ids, generator)


class PermutedConfig(TRIALConfig):
    """TRIAL's settings and defaults."""

    method_class = PermutedProfile


CONFIG = PermutedConfig
