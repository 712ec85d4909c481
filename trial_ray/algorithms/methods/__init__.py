"""The methods by name, and the change of a config from one method to another."""

from __future__ import annotations

import difflib
import importlib.util
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from trial_ray.errors import ConfigError
from trial_ray.user_files import running_user_file

if TYPE_CHECKING:
    from trial_ray.algorithms.grpo_config import GRPOConfig

METHODS_FOLDER = Path(__file__).parent
_OWN_MODULES = "trial_ray_method_"
"""Prefix of the names of modules that were loaded from a user's file."""


def method_names() -> tuple[str, ...]:
    """Names of the methods that come with this package, known without importing any of them (or Ray)."""
    return tuple(sorted(file.stem for file in METHODS_FOLDER.glob("[!_]*.py")))


def config_class(method: str) -> type[GRPOConfig]:
    """The config class of a method: a name, or the path of a Python file that defines ``CONFIG``.

    Raises:
        ConfigError: no method has that name, or the file is missing or defines no ``CONFIG``.
        UserInputError: the file fails.
    """
    if method.endswith(".py"):
        return _config_of(_load_file(Path(method)), method)
    if method not in method_names():
        nearest = difflib.get_close_matches(method, method_names(), n=1)
        hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
        raise ConfigError(
            f"Unknown method {method!r}; the methods are {', '.join(method_names())}, or a file that ends in .py.{hint}"
        )
    return _config_of(import_module(f"trial_ray.algorithms.methods.{method}"), method)


def new_config(method: str) -> GRPOConfig:
    """The default config of a method; errors as :func:`config_class`."""
    return config_class(method)()


def method_of(config: GRPOConfig) -> str:
    """The name under which :func:`config_class` finds the config's class."""
    for name in method_names():
        if config_class(name) is type(config):
            return name
    module = sys.modules[type(config).__module__]
    if getattr(module, "CONFIG", None) is type(config) and module.__file__:
        return str(Path(module.__file__).resolve())
    raise ConfigError(
        f"{type(config).__name__} belongs to no method that could be found again; put it into a file of its own that "
        "defines CONFIG, and train with --method FILE.py."
    )


def with_method(config: GRPOConfig, method: str) -> GRPOConfig:
    """``config``'s settings under another method: what it changed from its own defaults is carried over."""
    target, defaults = new_config(method), vars(type(config)())
    for name, value in vars(config).items():
        if name in ("algo_class", "_is_frozen") or name not in vars(target):
            continue
        if name not in defaults or not _same(value, defaults[name]):
            setattr(target, name, value)
    return target


def _same(value: Any, default: Any) -> bool:
    try:
        return bool(value == default)
    except (TypeError, ValueError):  # arrays and their like answer == element by element
        return value is default


def _config_of(module: ModuleType, method: str) -> type[GRPOConfig]:
    from trial_ray.algorithms.grpo_config import GRPOConfig

    found = getattr(module, "CONFIG", None)
    if not (isinstance(found, type) and issubclass(found, GRPOConfig)):
        raise ConfigError(f"{method} must define CONFIG, a class derived from GRPOConfig; found {found!r}.")
    return found


def _load_file(path: Path) -> ModuleType:
    from ray import cloudpickle

    path = path.expanduser().resolve()
    name = _OWN_MODULES + path.stem
    loaded = sys.modules.get(name)
    if loaded is not None and loaded.__file__ == str(path):
        return loaded
    if not path.is_file():
        raise ConfigError(f"No method file {path}; give the path of a Python file that defines CONFIG.")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with running_user_file(path):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    # Actors cannot import this module, so its classes travel by value.
    cloudpickle.register_pickle_by_value(module)
    return module
