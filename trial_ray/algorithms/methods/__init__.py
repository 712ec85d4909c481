"""Training methods by name, and conversion of a config from one method to another."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trial_ray
from trial_ray.config.declare import did_you_mean
from trial_ray.errors import ConfigError
from trial_ray.files import examples_folder
from trial_ray.user_files import load_user_module

if TYPE_CHECKING:
    from trial_ray.algorithms.grpo import GRPOConfig

METHODS = {
    "grpo": ("GRPO", "GRPOConfig"),
    "trial": ("TRIAL", "TRIALConfig"),
    "uniform": ("Uniform", "UniformConfig"),
    "permuted": ("Permuted", "PermutedConfig"),
    "serl": ("SERL", "SERLConfig"),
    "sdar": ("SDAR", "SDARConfig"),
    "grpo_opsd": ("GRPO+OPSD", "GRPOOPSDConfig"),
    "opsd": ("OPSD", "OPSDConfig"),
    "opd": ("OPD", "OPDConfig"),
    "rft": ("RFT", "RFTConfig"),
    "rlsd": ("RLSD", "RLSDConfig"),
    "gigpo": ("GiGPO", "GiGPOConfig"),
}
"""Title of each method of this package in tables and figures, and name of its config class, by the method's name."""
EXAMPLES = {
    "stepopsd": "StepOPSD",
    "agentopsd": "AgentOPSD",
    "hgpo": "HGPO",
    "g2po": "G2PO",
    "sdpo": "SDPO",
    "skill_sd": "Skill-SD",
    "adrs": "ADRS",
}
"""Titles of the methods in ``tuned_examples/methods``, by name; each file defines ``CONFIG``, like a user's own method."""


def method_names() -> tuple[str, ...]:
    """Return the names of this package's methods and of the example methods, without importing Ray or the methods."""
    return tuple(sorted((*METHODS, *EXAMPLES)))


def method_title(method: str) -> str:
    """Return the title of a method in tables and figures; for a user's own method, its name."""
    return METHODS[method][0] if method in METHODS else EXAMPLES.get(method, method)


def config_class(method: str) -> type[GRPOConfig]:
    """Return the config class of a method, given by name or as the path of a Python file that defines ``CONFIG``.

    Raises:
        ConfigError: no method has that name, or the file is missing or defines no ``CONFIG``.
        UserInputError: the file raises an error.
    """
    if method in EXAMPLES:
        method = str(examples_folder() / "methods" / f"{method}.py")
    if method.endswith(".py"):
        module = load_user_module(Path(method), "CONFIG")
        from trial_ray.algorithms.grpo import GRPOConfig

        defined = getattr(module, "CONFIG", None)
        if not (isinstance(defined, type) and issubclass(defined, GRPOConfig)):
            raise ConfigError(f"{method} must define CONFIG, a class derived from GRPOConfig, got {defined!r}.")
        return defined
    if method not in METHODS:
        raise ConfigError(
            f"Unknown method {method!r}; the methods are {', '.join(method_names())}, or a file that ends in .py."
            f"{did_you_mean(method, method_names())}"
        )
    return getattr(trial_ray, METHODS[method][1])


def new_config(method: str) -> GRPOConfig:
    """Return the default config of a method. Raises the same errors as :func:`config_class`."""
    return config_class(method)()


def method_of(config: GRPOConfig) -> str:
    """Return the method's name, or the path of its file, for which :func:`config_class` returns the class of ``config``."""
    for name in (*METHODS, *EXAMPLES):
        if config_class(name) is type(config):
            return name
    module = sys.modules[type(config).__module__]
    if getattr(module, "CONFIG", None) is type(config) and module.__file__:
        return str(Path(module.__file__).resolve())
    raise ConfigError(
        f"{type(config).__name__} is not part of a method that could be found again; put it into its own file that defines CONFIG, "
        "and train with --method FILE.py."
    )


def with_method(config: GRPOConfig, method: str) -> GRPOConfig:
    """Return a config of ``method`` with those settings of ``config`` that differ from the defaults of the class of ``config``."""
    return with_settings_of(config, new_config(method))


def with_settings_of(config: GRPOConfig, target: GRPOConfig) -> GRPOConfig:
    """Copy the settings of ``config`` that differ from the defaults of its class into ``target``, and return ``target``."""
    defaults = vars(type(config)())
    for name, value in vars(config).items():
        if name in ("algo_class", "_is_frozen") or name not in vars(target):
            continue
        if name not in defaults or not _same(value, defaults[name]):
            setattr(target, name, value)
    return target


def _same(value: Any, default: Any) -> bool:
    try:
        return bool(value == default)
    except (TypeError, ValueError):  # A comparison of NumPy arrays has no single truth value.
        return value is default
