"""What the trainer knows of environments: one adapter each, and the environments of a run."""

from trial_ray.environments.adapter import EnvironmentAdapter, ReportLabels, WarmStartSpec
from trial_ray.environments.registry import EnvironmentEntry

__all__ = ["EnvironmentAdapter", "EnvironmentEntry", "ReportLabels", "WarmStartSpec"]
