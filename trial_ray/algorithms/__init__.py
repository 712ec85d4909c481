"""Algorithms and their configurations; ``methods`` holds one file a method."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trial_ray.algorithms.config import GRPOConfig
    from trial_ray.algorithms.grpo import GRPO
    from trial_ray.algorithms.methods.trial import TRIAL, TRIALConfig

_MODULES = {"GRPO": "grpo", "GRPOConfig": "config", "TRIAL": "methods.trial", "TRIALConfig": "methods.trial"}

__all__ = ["GRPO", "TRIAL", "GRPOConfig", "TRIALConfig"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"trial_ray.algorithms.{_MODULES[name]}"), name)
