"""Algorithms and their configurations; ``methods`` holds one file a method."""

from trial_ray.algorithms.grpo import GRPO
from trial_ray.algorithms.grpo_config import GRPOConfig
from trial_ray.algorithms.methods.trial import TRIAL, TRIALConfig

__all__ = ["GRPO", "TRIAL", "GRPOConfig", "TRIALConfig"]
