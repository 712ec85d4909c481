"""Adapters in files of the user's: ``--env-adapter FILE.py``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from trial_ray.environments.adapter import EnvironmentAdapter
from trial_ray.errors import ConfigError
from trial_ray.user_files import load_user_module


def load_adapters(files: Iterable[Path]) -> tuple[EnvironmentAdapter, ...]:
    """The ``ADAPTER`` of every file. A file may also register the environment that its adapter is of.

    Raises:
        ConfigError: a file is missing, defines no adapter, or one that cannot be used.
        UserInputError: a file fails; names the line.
    """
    adapters = []
    for file in files:
        module = load_user_module(file, "ADAPTER")
        found = getattr(module, "ADAPTER", None)
        if not isinstance(found, EnvironmentAdapter):
            others = [name for name, value in vars(module).items() if isinstance(value, EnvironmentAdapter)]
            seen = (
                f"an adapter named {others[0]}"
                if others
                else f"{found!r:.200}"
                if found is not None
                else "no such name"
            )
            raise ConfigError(f"{file} must define ADAPTER, a trial_ray.environments.EnvironmentAdapter; found {seen}.")
        found.check()
        adapters.append(found)
    return tuple(adapters)
