"""Algorithms and their configurations."""

from trial_ray.algorithms.grpo import GRPO
from trial_ray.algorithms.grpo_config import GRPOConfig
from trial_ray.algorithms.trial import TRIAL
from trial_ray.algorithms.trial_config import TRIALConfig

__all__ = ["GRPO", "TRIAL", "GRPOConfig", "TRIALConfig"]
