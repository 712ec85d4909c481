"""Warm start: behaviour cloning of an expert that explores, which gives reinforcement learning an initial success rate above 0."""

from trial_ray.warmstart.settings import WarmStartSettings
from trial_ray.warmstart.warmstart import WarmStartResult, warm_start

__all__ = ["WarmStartResult", "WarmStartSettings", "warm_start"]
