"""Warm start: behaviour cloning of an oracle that explores, so that reinforcement learning starts from some success."""

from trial_ray.warmstart.settings import WarmStartSettings
from trial_ray.warmstart.warmstart import WarmStartResult, warm_start

__all__ = ["WarmStartResult", "WarmStartSettings", "warm_start"]
