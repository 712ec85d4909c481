"""Difficulty levels of generated tasks, found by their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from trial_envs.errors import GeneratorSettingError

Level = TypeVar("Level")


def level_named(levels: Mapping[str, Level], name: str) -> Level:
    """The level of this name.

    Raises:
        GeneratorSettingError: no level has this name.
    """
    try:
        return levels[name]
    except KeyError:
        raise GeneratorSettingError(f"unknown difficulty {name!r}; expected one of {', '.join(levels)}") from None
