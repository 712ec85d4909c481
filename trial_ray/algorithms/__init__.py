"""Algorithms and their configurations; the package ``methods`` has one file per training method."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trial_ray

if TYPE_CHECKING:
    from trial_ray.algorithms.grpo import GRPO, GRPOConfig
    from trial_ray.algorithms.methods.trial import TRIAL, TRIALConfig

__all__ = ["GRPO", "TRIAL", "GRPOConfig", "TRIALConfig"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(trial_ray, name)
