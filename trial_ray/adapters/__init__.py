"""Environment adapters and the registry of a run's environments."""

from trial_ray.adapters.adapter import EnvironmentAdapter, ReportLabels, WarmStartSpec
from trial_ray.adapters.program import program_adapter
from trial_ray.adapters.registry import EnvironmentEntry

__all__ = ["EnvironmentAdapter", "EnvironmentEntry", "ReportLabels", "WarmStartSpec", "program_adapter"]
