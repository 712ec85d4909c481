"""Environment adapters and the registry of a run's environments."""

from trial_ray.environments.adapter import EnvironmentAdapter, ReportLabels, WarmStartSpec
from trial_ray.environments.registry import EnvironmentEntry

__all__ = ["EnvironmentAdapter", "EnvironmentEntry", "ReportLabels", "WarmStartSpec"]
