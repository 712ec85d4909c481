"""Environment adapters and the registry of a run's environments."""

from trial_ray.environments.adapter import EnvironmentAdapter, ReportLabels, WarmStartSpec
from trial_ray.environments.program import program_adapter
from trial_ray.environments.registry import EnvironmentEntry

__all__ = ["EnvironmentAdapter", "EnvironmentEntry", "ReportLabels", "WarmStartSpec", "program_adapter"]
