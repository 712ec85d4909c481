"""Sweep files: the search space and the trials."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from importlib.util import find_spec
from operator import getitem
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from trial_envs.core.extras import install_command
from trial_ray.algorithms.config import plain
from trial_ray.config.declare import did_you_mean, is_search
from trial_ray.errors import ConfigError, MissingDependencyError, UserInputError, first_line
from trial_ray.files import content_key, finite
from trial_ray.metrics import EVALUATION, TRAINING_SUCCESS
from trial_ray.runs.config_record import is_json, to_record
from trial_ray.runs.experiment import load_experiment
from trial_ray.runs.metrics_file import check_metric
from trial_ray.runs.overrides import apply_overrides, settable_names
from trial_ray.secrets import redacted

if TYPE_CHECKING:
    from trial_ray.algorithms.grpo import GRPOConfig
    from trial_ray.runs.experiment import Experiment

SEED = "seed"
"""Name of the setting that results are aggregated over."""


def search_space(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield each value that Tune chooses: its dotted path, as in ``--set``, and its grid or distribution.

    Raises:
        ConfigError: a grid or distribution has no dotted path because it is in a list or tuple, or under a key with a dot.
    """
    for name, value in settings.items():
        if str(name).startswith("_"):
            continue
        found = [("", value)] if is_search(value) else _searched_inside(value)
        if found and not (isinstance(name, str) and "." not in name):
            raise ConfigError(
                f"A search under the key {name!r} has no name in tables; use a key that is text without a dot."
            )
        yield from ((f"{name}.{path}" if path else name, inner) for path, inner in found)


def _searched_inside(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return list(search_space(value))
    if isinstance(value, list | tuple) and any(is_search(each) or _searched_inside(each) for each in value):
        raise ConfigError(
            f"A search inside {value!r:.200} does not choose a whole setting: let Tune choose all of it, such as "
            "tune.grid_search([(...), (...)])."
        )
    return []


def is_grid(space: Any) -> bool:
    """Return True if ``space`` is a ``tune.grid_search``, False if it is a distribution."""
    return isinstance(space, dict)


def grid_size(searched: Mapping[str, Any]) -> int:
    """Number of points of the grid; 1 if all values are drawn from distributions."""
    return math.prod(len(space["grid_search"]) for space in searched.values() if is_grid(space))


def points(searched: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield points that together contain every value of the grid: each setting's values are checked, not every combination.

    Raises:
        ConfigError: a grid is empty, or no value can be drawn from a distribution.
    """
    choices = {
        path: space["grid_search"] if is_grid(space) else [_draw(path, space)] for path, space in searched.items()
    }
    empty = [path for path, values in choices.items() if not values]
    if empty:
        raise ConfigError(f"tune.grid_search of {empty[0]} is empty.")
    for index in range(max((len(values) for values in choices.values()), default=1)):
        yield {path: values[min(index, len(values) - 1)] for path, values in choices.items()}


def _draw(path: str, space: Any) -> Any:
    try:
        return space.sample()
    except Exception as error:  # of a user's function
        raise ConfigError(
            f"{path} cannot be drawn ({type(error).__name__}: {first_line(error)}). The function in tune.sample_from may not read "
            "other settings, because values are checked before there are trials."
        ) from error


def at_point(config: GRPOConfig, point: Mapping[str, Any]) -> GRPOConfig:
    """Return a copy of ``config`` with the values of one point."""
    chosen: GRPOConfig = config.copy(copy_frozen=False)
    for path, value in point.items():
        name, *inside = path.split(".")
        setattr(chosen, name, _replaced(getattr(chosen, name), inside, value))
    return chosen


def _replaced(values: Any, path: list[str], value: Any) -> Any:
    if not path:
        return value
    return {**values, path[0]: _replaced(values[path[0]], path[1:], value)}


NAMES = ("config", "stop", "metric", "mode", "num_samples", "scheduler", "search_alg", "max_concurrent_trials")
"""Names that a sweep file may define, in addition to constants in capitals and names that start with an underscore."""


@dataclass(frozen=True, slots=True)
class SweepFile:
    """The checked contents of a sweep file.

    Attributes:
        path: the file.
        config: the configuration, which contains the search space.
        stop: a trial ends when any of these metrics reaches its value.
        searched: grid or distribution of every searched setting, by dotted path; ``None`` for a setting that only the
            scheduler changes.
        metric: ``/``-joined result key that ranks the trials.
        mode: ``"max"`` or ``"min"``.
        num_samples: number of draws, or of repeats of the grid.
        scheduler: Ray Tune scheduler; ``None``: every trial runs to its end.
        search_alg: Ray Tune searcher; ``None``: grid and random draws.
        max_concurrent_trials: maximum number of trials at a time; ``None``: limited only by the cluster's resources.
        iterations: value that replaced ``stop["training_iteration"]``.
        overrides: ``key=value`` settings that were applied to the config.
        key: digest of :meth:`description` when the file was read; Tune writes into the scheduler and the searcher.
    """

    path: Path
    config: GRPOConfig
    stop: dict[str, float]
    searched: dict[str, Any]
    metric: str
    mode: str
    num_samples: int
    scheduler: Any
    search_alg: Any
    max_concurrent_trials: int | None
    iterations: int | None = None
    overrides: tuple[str, ...] = ()
    key: str = ""

    @classmethod
    def load(cls, file: Path, iterations: int | None = None, overrides: list[str] | None = None) -> SweepFile:
        """Read a sweep file and check every value of its grid.

        Args:
            file: the file.
            iterations: replaces ``stop["training_iteration"]``.
            overrides: ``key=value`` settings to apply to the config.

        Raises:
            UserInputError: the file does not define a sweep.
            MissingDependencyError: the file uses a package that is not installed.
            ConfigError: a name is unknown, or a value is invalid at one or more points of the grid.
        """
        experiment = _load(file)
        names = experiment.names
        _check_names(file, names)
        stop = {**experiment.stop, "training_iteration": iterations} if iterations else experiment.stop
        if not stop:
            raise ConfigError(f"{file} defines no `stop`; define it, or give --iterations N.")
        for each in overrides or []:
            if redacted(each) != each:
                raise ConfigError(
                    f"--set {redacted(each)} has a value that looks like a secret, and a sweep records its settings. Put it "
                    "into an environment variable, and name that: ${NAME}."
                )
        config = apply_overrides(experiment.config, overrides or [])
        searched: dict[str, Any] = dict(search_space(vars(config)))
        scheduler = names.get("scheduler")
        _check_mutations(file, scheduler, config)
        mutated = {path: searched.get(path) for path in mutations(scheduler)}
        if not {**searched, **mutated}:
            raise UserInputError(f"{file} searches over nothing: give a setting tune.grid_search([...]), or use train.")
        found = cls(
            path=file,
            config=config,
            stop=stop,
            searched={**searched, **mutated},
            metric=names.get("metric", TRAINING_SUCCESS),
            mode=names.get("mode", "max"),
            num_samples=_count(file, names, "num_samples", 1),
            scheduler=scheduler,
            search_alg=names.get("search_alg"),
            max_concurrent_trials=_count(file, names, "max_concurrent_trials", None),
            iterations=iterations,
            overrides=tuple(overrides or ()),
        )
        found._check_search()
        for chosen in found.configs():
            chosen.validate()
            if "training_iteration" in stop:
                chosen.require_schedules_within(stop["training_iteration"])
            for name, role in ((found.metric, "metric"), *((name, "a key of stop") for name in stop)):
                check_metric(name, role, chosen)
        return replace(found, key=content_key(found.description()))

    @property
    def chosen_by_tune(self) -> dict[str, Any]:
        """The search space inside the config."""
        return {path: space for path, space in self.searched.items() if space is not None}

    @property
    def num_trials(self) -> int:
        """Total number of trials of the sweep."""
        return grid_size(self.chosen_by_tune) * self.num_samples

    @property
    def seeds(self) -> list[int]:
        """Seeds of every point if the seed is searched as a grid; else empty."""
        space = self.searched.get(SEED)
        return list(space["grid_search"]) if isinstance(space, dict) else []

    @property
    def draws_values(self) -> bool:
        """True if any value is drawn from a distribution."""
        return any(not is_grid(space) for space in self.chosen_by_tune.values())

    @property
    def repeats(self) -> int:
        """Minimum number of trials of each point.

        One per seed, times ``num_samples`` unless values are drawn, chosen by a searcher or changed by a population.
        """
        drawn = self.draws_values or self.search_alg is not None or is_population_based(self.scheduler)
        return max(1, len(self.seeds)) * (1 if drawn else self.num_samples)

    @property
    def trial_name(self) -> Callable[[Any], str] | None:
        """Function that names Tune's trials and their folders; ``None``: Tune names them."""
        return None

    def param_space(self) -> Any:
        """Return Tune's ``param_space``: the config that its trials are created from."""
        config = recorded_config(self.config)
        if self.search_alg is not None and self.seeds:
            config.debugging(seed=self.seeds[0])
        return config

    def parameters(self, result: Any) -> dict[str, Any]:
        """Return the chosen values of a trial, by dotted path, from its Tune result; empty if the trial never started."""
        return {path: reduce(getitem, path.split("."), result.config) for path in self.searched if result.config}

    def configs(self) -> Iterator[GRPOConfig]:
        """Yield configs that together contain every value of the grid."""
        return (at_point(self.config, point) for point in points(self.chosen_by_tune))

    def description(self) -> dict[str, Any]:
        """Return the fields that determine the trials and their ranking, as JSON values.

        Two files with equal descriptions define the same sweep.
        """
        record = to_record(self.config)
        of_search = ("stop", "metric", "mode", "num_samples", "scheduler", "search_alg")
        found = {
            "method": record["method"],
            **{f"config.{name}": value for name, value in record["settings"].items()},
            **self.searched,
            **{name: getattr(self, name) for name in of_search},
        }
        described: dict[str, Any] = finite(found, default=_as_json)
        return described

    def _check_search(self) -> None:
        from ray.tune.schedulers import TrialScheduler
        from ray.tune.search import ConcurrencyLimiter, Repeater, Searcher

        if self.mode not in ("min", "max"):
            raise ConfigError(f"{self.path} defines mode = {self.mode!r}; expected 'max' or 'min'.")
        if not isinstance(self.metric, str):
            raise ConfigError(
                f"{self.path} defines metric = {self.metric!r}; expected a result key such as {TRAINING_SUCCESS}."
            )
        _check_kind(self.path, "scheduler", self.scheduler, (TrialScheduler,), "ASHAScheduler(max_t=30)")
        _check_kind(self.path, "search_alg", self.search_alg, (Searcher,), "OptunaSearch(seed=0)")
        if isinstance(self.search_alg, ConcurrencyLimiter | Repeater):
            raise ConfigError(
                f"{self.path} wraps search_alg in {type(self.search_alg).__name__}, which Tune could not restore. Give the "
                "searcher itself, with max_concurrent_trials or a grid of seeds."
            )
        if is_population_based(self.scheduler) and self.search_alg is not None:
            raise ConfigError(
                f"{self.path} gives a population a search_alg; its members change their settings themselves."
            )
        if self.search_alg is not None:
            self._check_searcher()
        if is_population_based(self.scheduler) and self.seeds:
            raise ConfigError(
                f"{self.path} gives a population several seeds, but its trials copy each other's weights, so seeds are not "
                "repetitions. Leave seed out of the search."
            )
        # ASHA and the median rule skip iterations without the metric.
        every_iteration = self.search_alg is not None or takes_turns(self.scheduler)
        if every_iteration and self.metric.startswith(EVALUATION) and self.config.evaluation_interval != 1:
            raise ConfigError(
                f"{self.metric} must be reported in every iteration for this search: set "
                ".evaluation(evaluation_interval=1)."
            )

    def _check_searcher(self) -> None:
        """Check that the searcher supports the search space."""
        from ray.rllib.utils import unflatten_dict

        space = {path: each for path, each in self.chosen_by_tune.items() if not (path == SEED and is_grid(each))}
        for path, each in space.items():
            if is_grid(each):
                raise ConfigError(
                    f"{path} is a tune.grid_search, but search_alg chooses from distributions. Write "
                    f"tune.choice({each['grid_search']}); only the seed may be a grid."
                )
        convert = getattr(type(self.search_alg), "convert_search_space", None)
        if convert is None:
            return
        for path, each in space.items():
            try:
                convert(unflatten_dict({path: each}, "."))
            except (ValueError, NotImplementedError, TypeError) as error:
                raise ConfigError(
                    f"{type(self.search_alg).__name__} cannot search over {path}: {first_line(error)}"
                ) from error


def recorded_config(config: GRPOConfig) -> GRPOConfig:
    """Return a copy of a config that records rollouts and training data and has the date for chat templates fixed."""
    found: GRPOConfig = config.copy(copy_frozen=False)
    found.fix_date()
    found.recording(
        trajectories_folder=found.trajectories_folder or "trajectories",
        training_folder=found.training_folder or "training",
    )
    return found


def _as_json(value: Any) -> Any:
    """Return a value as JSON; Ray Tune's objects as their class with those attributes that are plain values or distributions."""
    if is_json(value := plain(value)):
        return value
    # Tune writes the state of a search into other objects, such as generators of random numbers.
    own = {name: each for name, each in getattr(value, "__dict__", {}).items() if _is_described(each)}
    return {type(value).__qualname__: own}


def _is_described(value: Any) -> bool:
    return is_json(value) or isinstance(value, dict) or type(value).__module__ == "ray.tune.search.sample"


def is_population_based(scheduler: Any) -> bool:
    """Return True if trials copy each other's weights and change their settings during training."""
    from ray.tune.schedulers import PopulationBasedTraining

    return isinstance(scheduler, PopulationBasedTraining)


def takes_turns(scheduler: Any) -> bool:
    """Return True if trials pause until others have caught up, so that all of them start before any has ended."""
    from ray.tune.schedulers import HyperBandScheduler

    return is_population_based(scheduler) or isinstance(scheduler, HyperBandScheduler)


def mutations(scheduler: Any) -> Iterator[str]:
    """Yield the dotted paths of the settings that a population-based scheduler changes."""
    if is_population_based(scheduler):
        yield from _leaves(scheduler._hyperparam_mutations)


def _leaves(settings: Mapping[str, Any]) -> Iterator[str]:
    for name, value in settings.items():
        if isinstance(value, dict) and value:
            yield from (f"{name}.{path}" for path in _leaves(value))
        else:
            yield name


def _load(file: Path) -> Experiment:
    try:
        return load_experiment(file)
    except UserInputError as error:
        # What Tune's wrapper of Optuna raises where it is missing, or hidden by a file of that name.
        missing = isinstance(error.__cause__, AssertionError) and find_spec("optuna") is None
        if missing and "Optuna must be installed" in str(error.__cause__):
            raise MissingDependencyError(
                f"{file} searches with Optuna, which is not installed: {install_command('optuna')}."
            ) from error
        raise


def _check_names(file: Path, names: Mapping[str, Any]) -> None:
    for name, value in names.items():
        helper = name.startswith("_") or name.isupper() or isinstance(value, type | ModuleType) or callable(value)
        if name not in NAMES and not helper:
            hint = did_you_mean(name, NAMES) or f" Call it _{name} if it is the file's own."
            raise ConfigError(f"{file} defines {name!r}, which a sweep does not use.{hint} Known: {', '.join(NAMES)}.")


def _check_kind(file: Path, name: str, value: Any, kinds: tuple[Any, ...], example: str) -> None:
    if value is None:
        return
    if not isinstance(value, kinds):
        raise ConfigError(f"{file} defines {name} = {value!r:.100}; expected one of Ray Tune's, such as {example}.")
    # A scheduler's metric is public and its mode is not; a searcher has both.
    own = getattr(value, "metric", None) or getattr(value, "mode", None) or getattr(value, "_mode", None)
    if own:
        raise ConfigError(
            f"{file} gives {type(value).__name__} its own metric or mode ({own!r}); write `metric` and `mode` only in the file, "
            "so that search and table agree."
        )


def _check_mutations(file: Path, scheduler: Any, config: GRPOConfig) -> None:
    for path in mutations(scheduler):
        name = path.partition(".")[0]
        if name not in vars(config):
            hint = did_you_mean(name, settable_names(vars(config)))
            raise ConfigError(f"{file}: hyperparam_mutations names {name!r}, which is not a setting.{hint}")


def _count(file: Path, names: Mapping[str, Any], name: str, default: int | None) -> Any:
    value = names.get(name, default)
    if value is not None and (type(value) is not int or value < 1):
        raise ConfigError(f"{file} defines {name} = {value!r}; expected a whole number of at least 1.")
    return value
