"""A sweep: the search space in a config, Ray Tune's run over it, and the table that it ends with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ray import tune
from rich.console import Console
from rich.table import Table

from trial_ray.errors import CheckpointError, ConfigError, UserInputError
from trial_ray.experiments.experiment import Experiment, load_experiment
from trial_ray.experiments.metrics import flatten
from trial_ray.experiments.overrides import apply_overrides
from trial_ray.experiments.progress import describe
from trial_ray.files import write_json
from trial_ray.settings import is_search

CHECKPOINT_EVERY = 5


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """One trial as it ended.

    Attributes:
        name: Tune's id of the trial, also the end of its folder's name.
        parameters: what the sweep chose for it.
        status: ``done``, ``failed``, or ``unfinished`` because the sweep was interrupted.
        iterations: iterations that it trained.
        metric: last value of the sweep's metric; ``None`` if it was never reported.
        seconds: time that it trained.
    """

    name: str
    parameters: dict[str, Any]
    status: str
    iterations: int
    metric: float | None
    seconds: float


@dataclass(slots=True)
class SweepResult:
    """Trials of a sweep, the best one first."""

    metric: str
    mode: str
    trials: list[TrialRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        sign = -1 if self.mode == "max" else 1
        self.trials.sort(key=lambda trial: (trial.metric is None, sign * (trial.metric or 0.0), trial.name))

    @property
    def failed(self) -> int:
        """Trials that ended with an error."""
        return sum(trial.status == "failed" for trial in self.trials)

    @property
    def unfinished(self) -> int:
        """Trials that an interrupt kept from ending."""
        return sum(trial.status == "unfinished" for trial in self.trials)

    def table(self) -> Table:
        """A rich table: one row a trial."""
        names = sorted({name for trial in self.trials for name in trial.parameters})
        table = Table(title=f"{len(self.trials)} trials by {self.metric} ({self.mode})")
        table.add_column("trial")
        for name in (*names, self.metric.rpartition("/")[2], "iterations", "seconds"):
            table.add_column(name, justify="right")
        table.add_column("status")
        for index, trial in enumerate(self.trials):
            metric = "-" if trial.metric is None else f"{trial.metric:.4g}"
            values = [str(trial.parameters.get(name, "")) for name in names]
            row = [trial.name, *values, metric, str(trial.iterations), f"{trial.seconds:.0f}", trial.status]
            table.add_row(*row, style="bold" if index == 0 and trial.metric is not None else None)
        return table

    def save(self, path: Path) -> Path:
        """Write the result as JSON."""
        return write_json(path, {"metric": self.metric, "mode": self.mode, "trials": [asdict(t) for t in self.trials]})


@dataclass(frozen=True, slots=True)
class Sweep:
    """What a sweep file defines, checked.

    Attributes:
        experiment: config (with the search space inside) and stop criteria.
        metric: ``/``-joined result key that ranks the trials.
        mode: ``"max"`` or ``"min"``.
    """

    experiment: Experiment
    metric: str
    mode: str

    @classmethod
    def load(cls, file: Path, iterations: int | None, overrides: list[str]) -> Sweep:
        """Read a sweep file and check every point of its grid.

        Raises:
            UserInputError: the file is no sweep.
            ConfigError: ``mode`` or ``stop`` is wrong, or the config is at some point of the grid.
        """
        experiment = load_experiment(file)
        stop = {**experiment.stop, "training_iteration": iterations} if iterations else experiment.stop
        if not stop:
            raise ConfigError(f"{file} defines no `stop`; define it, or give --iterations N.")
        config = apply_overrides(experiment.config, overrides)
        mode = experiment.names.get("mode", "max")
        if mode not in ("min", "max"):
            raise ConfigError(f"{file} defines mode = {mode!r}; expected 'max' or 'min'.")
        checked = Experiment(file, config, stop, experiment.names)
        searched = dict(search_space(vars(config)))
        if not searched:
            raise UserInputError(f"{file} searches over nothing: give a setting tune.grid_search([...]), or use train.")
        for point in _points(searched):
            chosen = _at(config, point)
            chosen.validate()
            if "training_iteration" in stop:
                chosen.require_schedules_within(stop["training_iteration"])
        return cls(checked, experiment.names.get("metric", "env_runners/success_rate"), mode)

    def require_folder(self, folder: Path, resume: bool) -> None:
        """Check that the sweep may use ``folder``.

        Raises:
            UserInputError: a new sweep's folder is not empty.
            CheckpointError: there is nothing to continue.
        """
        if resume and not tune.Tuner.can_restore(str(folder)):
            raise CheckpointError(f"{folder} holds no sweep to continue.")
        if not resume and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserInputError(f"{folder} exists and is not empty. Name a new folder, or continue with --resume.")

    def fit(self, folder: Path, resume: bool = False) -> SweepResult:
        """Run, or continue, every trial; print a line an iteration."""
        results = self._tuner(folder, resume).fit()
        space = [path for path, _ in search_space(vars(self.experiment.config))]
        return SweepResult(self.metric, self.mode, [_record(result, space, self.metric) for result in results])

    def _tuner(self, folder: Path, resume: bool) -> Any:
        names, config = self.experiment.names, self.experiment.config
        if resume:
            return tune.Tuner.restore(
                str(folder),
                trainable=config.algo_class,
                param_space=config,
                resume_unfinished=True,
                restart_errored=True,
            )
        return tune.Tuner(
            config.algo_class,
            param_space=config,
            tune_config=tune.TuneConfig(
                metric=self.metric,
                mode=self.mode,
                num_samples=names.get("num_samples", 1),
                scheduler=names.get("scheduler"),
                max_concurrent_trials=names.get("max_concurrent_trials"),
            ),
            run_config=tune.RunConfig(
                name=folder.name,
                storage_path=str(folder.parent),
                stop=self.experiment.stop,
                callbacks=[SweepReporter()],
                checkpoint_config=tune.CheckpointConfig(
                    checkpoint_frequency=CHECKPOINT_EVERY, checkpoint_at_end=True, num_to_keep=1
                ),
                verbose=0,
            ),
        )


class SweepReporter(tune.Callback):
    """Prints as trials progress. Tune stores its callbacks beside the sweep, so this one holds nothing."""

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """A trial finished an iteration."""
        _print(f"{_name(trial)}  iteration {result['training_iteration']}  {describe(flatten(result))}")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A trial failed."""
        _print(f"{_name(trial)}  failed")


def search_space(settings: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Paths to every value that Tune chooses, and the grid or distribution that it chooses from."""
    for name, value in settings.items():
        if is_search(value):
            yield (name,), value
        elif isinstance(value, dict) and not name.startswith("_"):
            yield from (((name, *path), inner) for path, inner in search_space(value))


def _points(searched: dict[tuple[str, ...], Any]) -> Iterator[dict[tuple[str, ...], Any]]:
    """Enough points to meet every value of the grid once: ranges of settings are checked one by one."""
    choices = {
        path: space["grid_search"] if isinstance(space, dict) else [space.sample()] for path, space in searched.items()
    }
    empty = [".".join(path) for path, values in choices.items() if not values]
    if empty:
        raise ConfigError(f"tune.grid_search of {empty[0]} is empty.")
    for index in range(max(len(values) for values in choices.values())):
        yield {path: values[min(index, len(values) - 1)] for path, values in choices.items()}


def _at(config: Any, point: dict[tuple[str, ...], Any]) -> Any:
    chosen = config.copy(copy_frozen=False)
    for (name, *path), value in point.items():
        setattr(chosen, name, _replaced(getattr(chosen, name), path, value))
    return chosen


def _replaced(values: Any, path: list[str], value: Any) -> Any:
    if not path:
        return value
    return {**values, path[0]: _replaced(values[path[0]], path[1:], value)}


def _record(result: Any, space: list[tuple[str, ...]], metric: str) -> TrialRecord:
    metrics, config = result.metrics or {}, result.config or {}  # both absent in a trial that never started
    status = "failed" if result.error else "done" if metrics.get("done") else "unfinished"
    return TrialRecord(
        name=metrics.get("trial_id") or Path(result.path).name,
        parameters={".".join(path): _value_at(config, path) for path in space if config},
        status=status,
        iterations=int(metrics.get("training_iteration", 0)),
        metric=flatten(metrics).get(metric),
        seconds=float(metrics.get("time_total_s", 0.0)),
    )


def _value_at(config: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        config = config[name]
    return config


def _name(trial: Any) -> str:
    return str(trial.custom_trial_name or trial.trial_id)


def _print(line: str) -> None:
    Console().print(line, highlight=False, soft_wrap=True, markup=False)
