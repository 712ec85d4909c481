"""Sweep plans: the trials of a sweep and how they are ranked, read from a sweep file and checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from importlib.util import find_spec
from operator import getitem
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from trial_envs.core.extras import install_command
from trial_ray.algorithms.config import plain
from trial_ray.algorithms.methods import with_method
from trial_ray.config.declare import did_you_mean
from trial_ray.errors import ConfigError, MissingDependencyError, UserInputError, first_line
from trial_ray.files import Json, Numbers, Record, finite
from trial_ray.metrics import EVALUATION, TRAINING_SUCCESS
from trial_ray.runs.config_record import is_json, to_record
from trial_ray.runs.experiment import Experiment, apply_overrides, load_experiment, settable_names
from trial_ray.runs.metrics_file import check_metric
from trial_ray.secrets import redacted
from trial_ray.sweeps.space import (
    SEED,
    at_point,
    covering_points,
    draws_values,
    grid_size,
    is_population_based,
    mutated_settings,
    pauses_trials,
    search_space,
    seeds_of,
)

if TYPE_CHECKING:
    from trial_ray.algorithms.grpo import GRPOConfig

NAMES = ("config", "stop", "metric", "mode", "num_samples", "scheduler", "search_alg", "max_concurrent_trials")
"""Names that a sweep file may define, in addition to constants in capitals and names that start with an underscore."""


@dataclass(frozen=True)
class SweepPlan:
    """The trials of a sweep, made by :func:`load_plan` or :func:`trial_ray.sweeps.study.plan_study`.

    Attributes:
        path: the sweep file, or the scale file of a study.
        configs: configs that together contain every value of the search space's grids, and a draw from each distribution.
        param_space: Tune's ``param_space``.
        num_trials: total number of trials.
        parameters: function that returns the chosen values of a trial, by dotted path, from the trial's Tune result.
        description: fields that determine the trials and their ranking, as JSON values. Plans with equal descriptions define
            the same sweep.
        stop: a trial ends when any of these metrics reaches its value.
        metric: ``/``-joined result key that ranks the trials.
        mode: ``"max"`` or ``"min"``.
        repeats: minimum number of trials of each point; trials of a point differ at most in the seed.
        config: config of the sweep file, which contains the search space; for a study, the config of its first run.
        spaces: grid or distribution of every searched setting of a sweep file, by dotted path; ``None`` for a setting that only
            the scheduler changes.
        num_samples: number of draws, or of repeats of the grid.
        scheduler: Ray Tune scheduler, or ``None`` if every trial runs to its end.
        search_alg: Ray Tune searcher, or ``None`` for grids and random draws.
        max_concurrent_trials: maximum number of trials at a time, or ``None`` if only the cluster's resources limit it.
        trial_name: function that names Tune's trials and their folders, or ``None`` if Tune names them.
        iterations: value that replaced ``stop["training_iteration"]``, or ``None`` if it was not replaced.
        overrides: ``key=value`` settings that were applied to the config.
        method: name of the method that replaced the file's method, or ``None`` if it was not replaced.
    """

    path: Path
    configs: tuple[GRPOConfig, ...]
    param_space: Any
    num_trials: int
    parameters: Callable[[Any], Json]
    description: Json
    stop: Numbers
    metric: str
    mode: str
    repeats: int
    config: GRPOConfig
    spaces: Record
    num_samples: int = 1
    scheduler: Any = None
    search_alg: Any = None
    max_concurrent_trials: int | None = None
    trial_name: Callable[[Any], str] | None = None
    iterations: int | None = None
    overrides: tuple[str, ...] = ()
    method: str | None = None


def load_plan(
    file: Path, iterations: int | None = None, overrides: Sequence[str] = (), method: str | None = None
) -> SweepPlan:
    """Read a sweep file and check every value of its grid.

    Args:
        file: the sweep file.
        iterations: value that replaces ``stop["training_iteration"]``, or ``None`` to keep the file's.
        overrides: ``key=value`` settings to apply to the config.
        method: name of a method that replaces the file's method and inherits the settings and search spaces that both have, or
            ``None`` to keep the file's.

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
    _check_secrets(overrides)
    config = experiment.config if method is None else with_method(experiment.config, method)
    config = apply_overrides(config, overrides)
    scheduler, search_alg = names.get("scheduler"), names.get("search_alg")
    _check_mutations(file, scheduler, config)
    spaces: Json = dict(search_space(vars(config)))
    spaces |= {path: spaces.get(path) for path in mutated_settings(scheduler)}
    if not spaces:
        raise UserInputError(f"{file} searches over nothing: give a setting tune.grid_search([...]), or use train.")
    search = {
        "stop": stop,
        "metric": names.get("metric", TRAINING_SUCCESS),
        "mode": names.get("mode", "max"),
        "num_samples": _count(file, names, "num_samples", 1),
        "scheduler": scheduler,
        "search_alg": search_alg,
    }
    seeds, param_space = seeds_of(spaces), recorded_config(config)
    if search_alg is not None and seeds:
        param_space.debugging(seed=seeds[0])  # A searcher suggests no seeds: EverySeed sets them.
    # num_samples repeats the same points only if no value is drawn, suggested by a searcher or mutated by a scheduler.
    repeats_grid = not (draws_values(spaces) or search_alg is not None or is_population_based(scheduler))
    plan = SweepPlan(
        path=file,
        configs=tuple(at_point(config, point) for point in covering_points(spaces)),
        param_space=param_space,
        num_trials=grid_size(spaces) * search["num_samples"],
        parameters=partial(_chosen_values, list(spaces)),
        description=_description(config, spaces, search),
        repeats=max(1, len(seeds)) * (search["num_samples"] if repeats_grid else 1),
        config=config,
        spaces=spaces,
        max_concurrent_trials=_count(file, names, "max_concurrent_trials", None),
        iterations=iterations,
        overrides=tuple(overrides),
        method=method,
        **search,
    )
    _check_search(plan)
    for chosen in plan.configs:
        chosen.validate()
        if "training_iteration" in stop:
            chosen.require_schedules_within(stop["training_iteration"])
        check_metric(plan.metric, "metric", chosen)
        for name in stop:
            check_metric(name, "a key of stop", chosen)
    return plan


def recorded_config(config: GRPOConfig) -> GRPOConfig:
    """Return a copy of a config that records rollouts and training data, and in which the chat template's date is fixed."""
    recorded: GRPOConfig = config.copy(copy_frozen=False)
    recorded.fix_date()
    recorded.recording(
        trajectories_folder=recorded.trajectories_folder or "trajectories",
        training_folder=recorded.training_folder or "training",
    )
    return recorded


def _chosen_values(paths: Sequence[str], result: Any) -> Json:
    """Return the values of a trial by dotted path; empty if the trial never started."""
    return {path: reduce(getitem, path.split("."), result.config) for path in paths if result.config}


# -- description -------------------------------------------------------------------------------------------------------


def _description(config: GRPOConfig, spaces: Record, search: Record) -> Json:
    record = to_record(config)
    settings = {f"config.{name}": value for name, value in record["settings"].items()}
    return finite({"method": record["method"], **settings, **spaces, **search}, default=_as_json)


def _as_json(value: Any) -> Any:
    """Return a value as JSON; an object of Ray Tune becomes its class with its plain and distribution attributes."""
    if is_json(value := plain(value)):
        return value
    # Keep only attributes that are settings: other attributes, such as random-number generators, change during the search.
    attributes = {
        name: inner
        for name, inner in getattr(value, "__dict__", {}).items()
        if is_json(inner) or isinstance(inner, dict) or type(inner).__module__ == "ray.tune.search.sample"
    }
    return {type(value).__qualname__: attributes}


# -- checks ------------------------------------------------------------------------------------------------------------


def _load(file: Path) -> Experiment:
    try:
        return load_experiment(file)
    except UserInputError as error:
        # Tune's wrapper of Optuna raises an AssertionError if Optuna is not installed, or if a file optuna.py hides it.
        missing = isinstance(error.__cause__, AssertionError) and find_spec("optuna") is None
        if missing and "Optuna must be installed" in str(error.__cause__):
            raise MissingDependencyError(
                f"{file} searches with Optuna, which is not installed: {install_command('optuna')}."
            ) from error
        raise


def _check_names(file: Path, names: Record) -> None:
    for name, value in names.items():
        helper = name.startswith("_") or name.isupper() or isinstance(value, type | ModuleType) or callable(value)
        if name not in NAMES and not helper:
            hint = did_you_mean(name, NAMES) or f" Call it _{name} if it is a helper of the file."
            raise ConfigError(f"{file} defines {name!r}, which a sweep does not use.{hint} Known: {', '.join(NAMES)}.")


def _check_secrets(overrides: Sequence[str]) -> None:
    for override in overrides:
        if redacted(override) != override:
            raise ConfigError(
                f"--set {redacted(override)} has a value that looks like a secret, and a sweep records its settings. Put the value "
                "into an environment variable, and name the variable: ${NAME}."
            )


def _check_mutations(file: Path, scheduler: Any, config: GRPOConfig) -> None:
    for path in mutated_settings(scheduler):
        name = path.partition(".")[0]
        if name not in vars(config):
            hint = did_you_mean(name, settable_names(vars(config)))
            raise ConfigError(f"{file}: hyperparam_mutations names {name!r}, which is not a setting.{hint}")


def _count(file: Path, names: Record, name: str, default: int | None) -> Any:
    value = names.get(name, default)
    if value is not None and (type(value) is not int or value < 1):
        raise ConfigError(f"{file} defines {name} = {value!r}; expected a whole number of at least 1.")
    return value


def _check_search(plan: SweepPlan) -> None:
    from ray.tune.schedulers import TrialScheduler
    from ray.tune.search import ConcurrencyLimiter, Repeater, Searcher

    file, scheduler, search_alg = plan.path, plan.scheduler, plan.search_alg
    if plan.mode not in ("min", "max"):
        raise ConfigError(f"{file} defines mode = {plan.mode!r}; expected 'max' or 'min'.")
    if not isinstance(plan.metric, str):
        raise ConfigError(f"{file} defines metric = {plan.metric!r}; expected a result key such as {TRAINING_SUCCESS}.")
    _check_kind(file, "scheduler", scheduler, TrialScheduler, "ASHAScheduler(max_t=30)")
    _check_kind(file, "search_alg", search_alg, Searcher, "OptunaSearch(seed=0)")
    if isinstance(search_alg, ConcurrencyLimiter | Repeater):
        raise ConfigError(
            f"{file} wraps search_alg in {type(search_alg).__name__}, which Tune could not restore. Give the searcher itself, with "
            "max_concurrent_trials or a grid of seeds."
        )
    if is_population_based(scheduler) and search_alg is not None:
        raise ConfigError(f"{file} gives a population a search_alg; its members change their settings themselves.")
    if search_alg is not None:
        _check_searcher(search_alg, plan.spaces)
    if is_population_based(scheduler) and seeds_of(plan.spaces):
        raise ConfigError(
            f"{file} gives a population several seeds, but its trials copy each other's weights, so seeds are not repetitions. "
            "Leave seed out of the search."
        )
    # Searchers, HyperBand and PBT need the metric in every iteration; ASHA and the median rule skip iterations without it.
    every_iteration = search_alg is not None or pauses_trials(scheduler)
    if every_iteration and plan.metric.startswith(EVALUATION) and plan.config.evaluation_interval != 1:
        raise ConfigError(
            f"{plan.metric} must be reported in every iteration for this search: set .evaluation(evaluation_interval=1)."
        )


def _check_kind(file: Path, name: str, value: Any, kind: Any, example: str) -> None:
    if value is None:
        return
    if not isinstance(value, kind):
        raise ConfigError(f"{file} defines {name} = {value!r:.100}; expected an object of Ray Tune, such as {example}.")
    # A scheduler has the attributes `metric` and `_mode`, a searcher `metric` and `mode`.
    own = getattr(value, "metric", None) or getattr(value, "mode", None) or getattr(value, "_mode", None)
    if own:
        raise ConfigError(
            f"{file} gives {type(value).__name__} its own metric or mode ({own!r}); write `metric` and `mode` only in the file, "
            "so that search and table agree."
        )


def _check_searcher(searcher: Any, spaces: Record) -> None:
    """Check that the searcher supports the search space; only the seed may be a grid."""
    from ray.rllib.utils import unflatten_dict

    convert = getattr(type(searcher), "convert_search_space", None)
    for path, space in spaces.items():
        if isinstance(space, dict):
            if path != SEED:
                raise ConfigError(
                    f"{path} is a tune.grid_search, but search_alg chooses from distributions. Write "
                    f"tune.choice({space['grid_search']}); only the seed may be a grid."
                )
        elif convert is not None:
            try:
                convert(unflatten_dict({path: space}, "."))
            except (ValueError, NotImplementedError, TypeError) as error:
                raise ConfigError(
                    f"{type(searcher).__name__} cannot search over {path}: {first_line(error)}"
                ) from error
