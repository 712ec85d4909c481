"""What a sweep found: its trials, the points that they are repeats of, and the tables of both."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from trial_ray.errors import CheckpointError
from trial_ray.evaluation.intervals import half_width
from trial_ray.experiments.search_space import SEED, dotted
from trial_ray.files import write_json, write_text

if TYPE_CHECKING:
    import pandas

SCHEMA = "trial_ray/sweep"
SCHEMA_VERSION = 1
DONE, FAILED, UNFINISHED = "done", "failed", "unfinished"


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """One trial as it ended.

    Attributes:
        name: Tune's id of the trial, also the end of its folder's name.
        parameters: what the sweep chose for it, by dotted path.
        status: ``done``, ``failed``, or ``unfinished`` because the sweep was interrupted.
        iterations: iterations that it trained.
        metric: last value of the sweep's metric; ``None`` if it was never reported.
        seconds: time that it trained.
        error: first line of what ended it; empty unless it failed.
    """

    name: str
    parameters: dict[str, Any]
    status: str
    iterations: int
    metric: float | None
    seconds: float
    error: str = ""


@dataclass(frozen=True, slots=True)
class Point:
    """Trials that differ in nothing but their seed.

    Attributes:
        parameters: what the sweep chose, the seed left out.
        values: last value of the metric of every trial that did not fail.
        failed: how many did.
        iterations: fewest iterations of those that did not.
    """

    parameters: dict[str, Any]
    values: tuple[float, ...]
    failed: int
    iterations: int

    @property
    def mean(self) -> float | None:
        """Mean over the seeds; ``None`` without a value."""
        return statistics.fmean(self.values) if self.values else None

    @property
    def half_width(self) -> float | None:
        """Half of the 95 % interval of the mean over seeds (Student's t); ``None`` for fewer than two."""
        if len(self.values) < 2:
            return None
        return half_width(self.values)

    def __str__(self) -> str:
        if self.mean is None:
            return "-"
        if self.half_width is None:
            return f"{self.mean:.4g}"
        return f"{self.mean:.4g} ± {self.half_width:.2g} (n={len(self.values)})"


@dataclass(slots=True)
class SweepResult:
    """Trials of a sweep, the best one first; :meth:`points` puts together what differs in the seed alone."""

    metric: str
    mode: str
    trials: list[TrialRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.trials.sort(key=lambda trial: (*self._rank(trial.metric), trial.name))

    def _rank(self, value: float | None) -> tuple[bool, float]:
        return value is None, (-1 if self.mode == "max" else 1) * (value or 0.0)

    @property
    def failed(self) -> int:
        """Trials that ended with an error."""
        return sum(trial.status == FAILED for trial in self.trials)

    @property
    def unfinished(self) -> int:
        """Trials that an interrupt kept from ending."""
        return sum(trial.status == UNFINISHED for trial in self.trials)

    @property
    def names(self) -> list[str]:
        """Dotted paths of what was chosen, the seed last."""
        found = {name for trial in self.trials for name in trial.parameters}
        return sorted(found, key=lambda name: (name == dotted(SEED), name))

    def points(self) -> list[Point]:
        """The points, the best mean first; a failed trial's value is not part of the mean."""
        found: dict[str, list[TrialRecord]] = {}
        for trial in self.trials:
            key = json.dumps(_without_seed(trial.parameters), sort_keys=True, default=repr)
            found.setdefault(key, []).append(trial)
        return sorted((_point(trials) for trials in found.values()), key=lambda point: self._rank(point.mean))

    def best(self) -> TrialRecord | None:
        """The best trial of the best point; ``None`` where no trial has a value."""
        ranked = self.points()
        if not ranked or ranked[0].mean is None:
            return None
        return next(
            trial
            for trial in self.trials
            if trial.metric is not None and _without_seed(trial.parameters) == ranked[0].parameters
        )

    def dataframe(self) -> pandas.DataFrame:
        """One row a trial: its parameters by their dotted paths, then the fields of :class:`TrialRecord`."""
        import pandas

        fields = ("status", "iterations", "seconds", "error")
        rows = [
            {
                "trial": trial.name,
                **{name: trial.parameters.get(name) for name in self.names},
                self.metric: trial.metric,
                **{name: getattr(trial, name) for name in fields},
            }
            for trial in self.trials
        ]
        return pandas.DataFrame(rows, columns=["trial", *self.names, self.metric, *fields])

    def table(self) -> Table:
        """A rich table: one row a trial."""
        table = Table(title=f"{len(self.trials)} trials by {self.metric} ({self.mode})")
        table.add_column("trial")
        for name in (*self.names, self.metric.rpartition("/")[2], "iterations", "seconds"):
            table.add_column(name, justify="right")
        table.add_column("status")
        if self.failed:
            table.add_column("error", overflow="fold", max_width=60)
        for index, trial in enumerate(self.trials):
            metric = "-" if trial.metric is None else f"{trial.metric:.4g}"
            values = [_shown(trial.parameters.get(name, "")) for name in self.names]
            row = [trial.name, *values, metric, str(trial.iterations), f"{trial.seconds:.0f}", trial.status]
            row += [trial.error] if self.failed else []
            table.add_row(*map(_escaped, row), style="bold" if index == 0 and trial.metric is not None else None)
        return table

    def points_table(self) -> Table | None:
        """A rich table: one row a point, mean and 95 % interval over its seeds; ``None`` where no point has several trials."""
        points = self.points()
        if len(points) == len(self.trials):
            return None
        names = [name for name in self.names if name != dotted(SEED)]
        table = Table(title=f"{len(points)} points: mean ± 95 % interval over seeds")
        for name in (*names, self.metric.rpartition("/")[2], "iterations", "failed"):
            table.add_column(name, justify="right")
        for index, point in enumerate(points):
            values = [_shown(point.parameters.get(name, "")) for name in names]
            row = [*values, str(point), str(point.iterations), str(point.failed)]
            table.add_row(*map(_escaped, row), style="bold" if index == 0 and point.mean is not None else None)
        return table

    def save(self, folder: Path) -> None:
        """Write ``sweep.json`` and ``results.csv`` (the rows of :meth:`dataframe`) into the sweep's folder."""
        record = {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, "metric": self.metric, "mode": self.mode}
        trials = [json.loads(json.dumps(asdict(trial), default=repr)) for trial in self.trials]
        write_json(folder / "sweep.json", {**record, "trials": trials})
        write_text(folder / "results.csv", self.dataframe().to_csv(index=False))

    @classmethod
    def load(cls, folder: Path) -> SweepResult:
        """Read what :meth:`save` wrote.

        Raises:
            CheckpointError: the sweep has not come to its end, or the file is damaged or of another version.
        """
        path = folder / "sweep.json"
        if not path.is_file():
            raise CheckpointError(
                f"{folder} holds no sweep.json: it is no sweep, or one that was cut off; --resume it."
            )
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            if (record["schema"], record["schema_version"]) != (SCHEMA, SCHEMA_VERSION):
                raise CheckpointError(f"{path} was written by another version; expected {SCHEMA} {SCHEMA_VERSION}.")
            return cls(record["metric"], record["mode"], [TrialRecord(**trial) for trial in record["trials"]])
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"Cannot read {path}: {type(error).__name__}: {error}.") from error


def _point(trials: Sequence[TrialRecord]) -> Point:
    ended = [trial for trial in trials if trial.status != FAILED]
    return Point(
        parameters=_without_seed(trials[0].parameters),
        values=tuple(trial.metric for trial in ended if trial.metric is not None),
        failed=len(trials) - len(ended),
        iterations=min((trial.iterations for trial in ended), default=0),
    )


def _without_seed(parameters: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in parameters.items() if name != dotted(SEED)}


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _escaped(text: str) -> str:
    """Text of an error may look like rich's markup."""
    from rich.markup import escape

    return escape(text)
