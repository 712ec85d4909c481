"""Names of the training methods, and the change of a config from one method to another."""

from __future__ import annotations

import difflib
from importlib import import_module
from typing import TYPE_CHECKING, Any

from trial_ray.errors import ConfigError

if TYPE_CHECKING:
    from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

# Name → (config class, settings that make it this method).
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("trial_ray.algorithms.grpo_config:GRPOConfig", {}),
    "trial": ("trial_ray.algorithms.trial_config:TRIALConfig", {"allocation": "relative"}),
    "uniform": ("trial_ray.algorithms.trial_config:TRIALConfig", {"allocation": "uniform"}),
    "permuted": ("trial_ray.algorithms.trial_config:TRIALConfig", {"allocation": "permuted"}),
}


def new_config(method: str) -> AlgorithmConfig:
    """The default config of a method.

    Raises:
        ConfigError: no method has that name.
    """
    if method not in METHODS:
        nearest = difflib.get_close_matches(method, METHODS, n=1)
        hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
        raise ConfigError(f"Unknown method {method!r}; the methods are {', '.join(METHODS)}.{hint}")
    path, settings = METHODS[method]
    module, _, name = path.partition(":")
    config = getattr(import_module(module), name)()
    for key, value in settings.items():
        setattr(config, key, value)
    return config


def method_of(config: AlgorithmConfig) -> str:
    """The name of a config's method; its class's name where it is none of :data:`METHODS`."""
    own = f"{type(config).__module__}:{type(config).__name__}"
    for method, (path, settings) in METHODS.items():
        if path == own and all(getattr(config, key, None) == value for key, value in settings.items()):
            return method
    return type(config).__name__


def with_method(config: AlgorithmConfig, method: str) -> AlgorithmConfig:
    """``config``'s settings under another method: what it changed from its own defaults is carried over."""
    target = new_config(method)
    fixed = METHODS[method][1]
    defaults = vars(type(config)())
    known = vars(target)
    for name, value in vars(config).items():
        if name in ("algo_class", "_is_frozen") or name not in known or name in fixed:
            continue
        if name not in defaults or not _same(value, defaults[name]):
            setattr(target, name, value)
    return target


def _same(value: Any, default: Any) -> bool:
    try:
        return bool(value == default)
    except (TypeError, ValueError):  # arrays and their like answer == element by element
        return value is default
