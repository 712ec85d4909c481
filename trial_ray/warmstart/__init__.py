"""Warm start: behaviour cloning of an expert, which gives reinforcement learning an initial success rate above 0.

In reading order:

- ``settings``: settings, and the tasks for demonstrations, checks and evaluation
- ``policy``: the initial model, its prompts, and its success in held-out games
- ``demonstrations``: decisions of the expert, with and without their outcome in the prompt
- ``cloning``: losses, batches and optimizers
- ``warmstart``: the whole warm start, and its cache
- ``agreement``: whether the hindsight log-ratio agrees with the expert
"""

from trial_ray.warmstart.settings import WarmStartSettings
from trial_ray.warmstart.warmstart import WarmStartResult, warm_start

__all__ = ["WarmStartResult", "WarmStartSettings", "warm_start"]
