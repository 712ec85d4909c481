"""Search spaces: the settings whose values Ray Tune chooses, and the points (combinations of values) of a search.

The space of a setting is a ``tune.grid_search``, which is a dict, or a distribution, which is not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trial_ray.config.declare import is_search
from trial_ray.errors import ConfigError, first_line
from trial_ray.files import Record

if TYPE_CHECKING:
    from trial_ray.algorithms.grpo import GRPOConfig


SEED = "seed"
"""Name of the setting over whose values results are averaged."""


def search_space(settings: Record) -> Iterator[tuple[str, Any]]:
    """Yield the dotted path (as in ``--set``) and the grid or distribution of each value that Tune chooses.

    Raises:
        ConfigError: a grid or distribution has no dotted path because it is in a list or tuple, or under a key with a dot.
    """
    for name, value in settings.items():
        if str(name).startswith("_"):
            continue
        spaces = [("", value)] if is_search(value) else _spaces_inside(value)
        if spaces and not (isinstance(name, str) and "." not in name):
            raise ConfigError(
                f"A search under the key {name!r} has no name in tables; use a key that is text without a dot."
            )
        yield from ((f"{name}.{path}" if path else name, space) for path, space in spaces)


def _spaces_inside(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return list(search_space(value))
    if isinstance(value, list | tuple) and any(is_search(item) or _spaces_inside(item) for item in value):
        raise ConfigError(
            f"A search inside {value!r:.200} does not choose a whole setting: let Tune choose all of it, such as "
            "tune.grid_search([(...), (...)])."
        )
    return []


def seeds_of(spaces: Record) -> list[int]:
    """Return the seeds of a search with a grid of seeds; else an empty list."""
    space = spaces.get(SEED)
    return list(space["grid_search"]) if isinstance(space, dict) else []


def draws_values(spaces: Record) -> bool:
    """Return True if Tune draws at least one value from a distribution."""
    return any(not isinstance(space, dict) for space in spaces.values() if space is not None)


def grid_size(spaces: Record) -> int:
    """Return the number of points of the grid; 1 if all values are drawn from distributions."""
    return math.prod(len(space["grid_search"]) for space in spaces.values() if isinstance(space, dict))


def covering_points(spaces: Record) -> Iterator[dict[str, Any]]:
    """Yield points that together contain every value of the grid, but not every combination of values.

    Args:
        spaces: grids and distributions by dotted path; values that only a scheduler changes (``None``) are omitted.

    Raises:
        ConfigError: a grid is empty, or no value can be drawn from a distribution.
    """
    choices = {
        path: space["grid_search"] if isinstance(space, dict) else [_draw(path, space)]
        for path, space in spaces.items()
        if space is not None
    }
    if empty := [path for path, values in choices.items() if not values]:
        raise ConfigError(f"tune.grid_search of {empty[0]} is empty.")
    for index in range(max((len(values) for values in choices.values()), default=1)):
        yield {path: values[min(index, len(values) - 1)] for path, values in choices.items()}


def _draw(path: str, space: Any) -> Any:
    try:
        return space.sample()
    except Exception as error:  # The user's function in tune.sample_from may raise any error.
        raise ConfigError(
            f"{path} cannot be drawn ({type(error).__name__}: {first_line(error)}). The function in tune.sample_from may not read "
            "other settings, because values are checked before there are trials."
        ) from error


def at_point(config: GRPOConfig, point: Record) -> GRPOConfig:
    """Return a copy of ``config`` with the values of one point, by dotted path."""
    chosen: GRPOConfig = config.copy(copy_frozen=False)
    for path, value in point.items():
        name, *inside = path.split(".")
        setattr(chosen, name, _with_value(getattr(chosen, name), inside, value))
    return chosen


def _with_value(settings: Any, path: list[str], value: Any) -> Any:
    if not path:
        return value
    return {**settings, path[0]: _with_value(settings[path[0]], path[1:], value)}


# -- schedulers --------------------------------------------------------------------------------------------------------


def is_population_based(scheduler: Any) -> bool:
    """Return True if the scheduler is population-based: trials copy weights of other trials and change settings during training."""
    from ray.tune.schedulers import PopulationBasedTraining

    return isinstance(scheduler, PopulationBasedTraining)


def pauses_trials(scheduler: Any) -> bool:
    """Return True if the scheduler pauses trials until others have caught up; all trials then start before any trial has ended."""
    from ray.tune.schedulers import HyperBandScheduler

    return is_population_based(scheduler) or isinstance(scheduler, HyperBandScheduler)


def mutated_settings(scheduler: Any) -> Iterator[str]:
    """Yield the dotted paths of the settings that a population-based scheduler changes."""
    if is_population_based(scheduler):
        yield from _leaves(scheduler._hyperparam_mutations)


def _leaves(settings: Record) -> Iterator[str]:
    for name, value in settings.items():
        if isinstance(value, dict) and value:
            yield from (f"{name}.{path}" for path in _leaves(value))
        else:
            yield name
