"""Trains language-model agents on Ray RLlib with TRIAL and the methods with which TRIAL is compared.

The public names are for experiments, custom training methods and custom environments. They are imported on first use, so the
command line starts without importing RLlib.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trial_ray.adapters.adapter import EnvironmentAdapter, ReportLabels, WarmStartSpec
    from trial_ray.algorithms.grpo import GRPO, GRPOConfig
    from trial_ray.algorithms.methods.gigpo import GiGPOConfig
    from trial_ray.algorithms.methods.opd import OPDConfig
    from trial_ray.algorithms.methods.opsd import OPSDConfig
    from trial_ray.algorithms.methods.rft import RFTConfig
    from trial_ray.algorithms.methods.rlsd import RLSDConfig
    from trial_ray.algorithms.methods.sdar import GRPOOPSDConfig, SDARConfig
    from trial_ray.algorithms.methods.serl import SERLConfig
    from trial_ray.algorithms.methods.trial import TRIAL, PermutedConfig, TRIALConfig, UniformConfig
    from trial_ray.config.declare import setting
    from trial_ray.learner.method import Method
    from trial_ray.secrets import secret

__version__ = "0.1.0"
_METHODS = "trial_ray.algorithms.methods"
_MODULES = {
    "GRPO": "trial_ray.algorithms.grpo",
    "GRPOConfig": "trial_ray.algorithms.grpo",
    "GRPOOPSDConfig": f"{_METHODS}.sdar",
    "GiGPOConfig": f"{_METHODS}.gigpo",
    "OPDConfig": f"{_METHODS}.opd",
    "OPSDConfig": f"{_METHODS}.opsd",
    "PermutedConfig": f"{_METHODS}.trial",
    "RFTConfig": f"{_METHODS}.rft",
    "RLSDConfig": f"{_METHODS}.rlsd",
    "SDARConfig": f"{_METHODS}.sdar",
    "SERLConfig": f"{_METHODS}.serl",
    "TRIAL": f"{_METHODS}.trial",
    "TRIALConfig": f"{_METHODS}.trial",
    "UniformConfig": f"{_METHODS}.trial",
    "EnvironmentAdapter": "trial_ray.adapters.adapter",
    "Method": "trial_ray.learner.method",
    "ReportLabels": "trial_ray.adapters.adapter",
    "WarmStartSpec": "trial_ray.adapters.adapter",
    "secret": "trial_ray.secrets",
    "setting": "trial_ray.config.declare",
}

__all__ = [
    "GRPO",
    "TRIAL",
    "EnvironmentAdapter",
    "GRPOConfig",
    "GRPOOPSDConfig",
    "GiGPOConfig",
    "Method",
    "OPDConfig",
    "OPSDConfig",
    "PermutedConfig",
    "RFTConfig",
    "RLSDConfig",
    "ReportLabels",
    "SDARConfig",
    "SERLConfig",
    "TRIALConfig",
    "UniformConfig",
    "WarmStartSpec",
    "__version__",
    "secret",
    "setting",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
