"""TRIAL: GRPO plus trajectory-relative hindsight distillation (the paper's Algorithm 1)."""

from __future__ import annotations

from trial_ray.algorithms.grpo import GRPO
from trial_ray.algorithms.trial_config import TRIALConfig


class TRIAL(GRPO):
    """The loop is GRPO's; what differs is the learner, which scores hindsight views and adds the dense loss."""

    config: TRIALConfig

    @classmethod
    def get_default_config(cls) -> TRIALConfig:
        """Default configuration."""
        return TRIALConfig()
