"""What a sweep chooses: the values in a config that stand for a search, by their paths."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from trial_ray.errors import ConfigError
from trial_ray.settings import is_search

if TYPE_CHECKING:
    from trial_ray.algorithms.grpo_config import GRPOConfig

SettingPath = tuple[str, ...]
"""Names that lead to a value: of the setting, then of the keys inside it."""
SEED: SettingPath = ("seed",)
"""Results are aggregated over it."""


def search_space(settings: Mapping[str, Any]) -> Iterator[tuple[SettingPath, Any]]:
    """Paths to every value that Tune chooses, and the grid or distribution that it chooses from."""
    for name, value in settings.items():
        if is_search(value):
            yield (name,), value
        elif isinstance(value, dict) and not name.startswith("_"):
            yield from (((name, *path), inner) for path, inner in search_space(value))


def is_grid(space: Any) -> bool:
    """Whether it is a ``tune.grid_search``; else it is a distribution."""
    return isinstance(space, dict)


def grid_size(searched: Mapping[SettingPath, Any]) -> int:
    """Points of the grid; 1 where everything is drawn."""
    return math.prod(len(space["grid_search"]) for space in searched.values() if is_grid(space))


def points(searched: Mapping[SettingPath, Any]) -> Iterator[dict[SettingPath, Any]]:
    """Enough points to meet every value of the grid once: ranges of settings are checked one by one.

    Raises:
        ConfigError: a grid is empty.
    """
    choices = {path: space["grid_search"] if is_grid(space) else [space.sample()] for path, space in searched.items()}
    empty = [dotted(path) for path, values in choices.items() if not values]
    if empty:
        raise ConfigError(f"tune.grid_search of {empty[0]} is empty.")
    for index in range(max((len(values) for values in choices.values()), default=1)):
        yield {path: values[min(index, len(values) - 1)] for path, values in choices.items()}


def at_point(config: GRPOConfig, point: Mapping[SettingPath, Any]) -> GRPOConfig:
    """A copy of ``config`` with the values of one point."""
    chosen: GRPOConfig = config.copy(copy_frozen=False)
    for (name, *path), value in point.items():
        setattr(chosen, name, _replaced(getattr(chosen, name), path, value))
    return chosen


def value_at(settings: Mapping[str, Any], path: Iterable[str]) -> Any:
    """The value that a path leads to."""
    value: Any = settings
    for name in path:
        value = value[name]
    return value


def nested(values: Mapping[SettingPath, Any]) -> dict[str, Any]:
    """Values by their paths as dicts in dicts."""
    found: dict[str, Any] = {}
    for path, value in values.items():
        inner = found
        for name in path[:-1]:
            inner = inner.setdefault(name, {})
        inner[path[-1]] = value
    return found


def dotted(path: SettingPath) -> str:
    """A path as ``--set`` takes it."""
    return ".".join(path)


def _replaced(values: Any, path: list[str], value: Any) -> Any:
    if not path:
        return value
    return {**values, path[0]: _replaced(values[path[0]], path[1:], value)}
