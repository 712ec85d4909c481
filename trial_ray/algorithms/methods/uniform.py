"""Uniform: TRIAL's dense loss with every turn weighing one, the controlled study's profile without allocation."""

from __future__ import annotations

from typing import ClassVar

import torch

from trial_ray.algorithms.methods.trial import TRIAL, TrajectoryRelative, TRIALConfig
from trial_ray.learner.method import Method
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

    method_class: ClassVar[type[Method]] = UnitProfile

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class or Uniform)


class Uniform(TRIAL):
    """GRPO's loop."""

    @classmethod
    def get_default_config(cls) -> UniformConfig:
        """Default configuration."""
        return UniformConfig()


CONFIG = UniformConfig
