"""Algorithms and their configurations; ``methods`` holds one file a method.

Names are imported when they are first used: the command line asks this package for the methods' names, without RLlib.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trial_ray.algorithms.config import GRPOConfig
    from trial_ray.algorithms.grpo import GRPO
    from trial_ray.algorithms.methods.trial import TRIAL, TRIALConfig

_MODULES = {
    "GRPO": "trial_ray.algorithms.grpo",
    "GRPOConfig": "trial_ray.algorithms.config",
    "TRIAL": "trial_ray.algorithms.methods.trial",
    "TRIALConfig": "trial_ray.algorithms.methods.trial",
}

__all__ = ["GRPO", "TRIAL", "GRPOConfig", "TRIALConfig"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
