"""Checks of environment settings: names of difficulty levels, and integers."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import TypeVar

from trial_envs.errors import GeneratorSettingError

Level = TypeVar("Level")


def level_named(levels: Mapping[str, Level], name: str) -> Level:
    """Return the difficulty level with this name.

    Raises:
        GeneratorSettingError: no level has this name.
    """
    try:
        return levels[name]
    except KeyError:
        raise GeneratorSettingError(f"Unknown difficulty {name!r}; expected one of {', '.join(levels)}.") from None


def require_whole(minimum: int, **numbers: object) -> None:
    """Check that settings, passed by name, are integers of at least ``minimum``.

    Floats are rejected, because a seed such as ``1e6`` would give task ids that the environment cannot parse.

    Raises:
        GeneratorSettingError: a value is not an integer, or is below ``minimum``.
    """
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or value < minimum:
            raise GeneratorSettingError(f"Expected {name} as a whole number from {minimum}, got {value!r}.")
