"""Results of a sweep: trials, points, and tables of both."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from trial_ray.errors import CheckpointError
from trial_ray.evaluation.statistics import differ, half_width
from trial_ray.files import checked_content, finite, read_json, write_json, write_text
from trial_ray.sweeps.plan import SEED

if TYPE_CHECKING:
    import pandas

SCHEMA = "trial_ray/sweep"
SCHEMA_VERSION = 2
DONE, UNFINISHED, FAILED = STATUSES = ("done", "unfinished", "failed")
"""Statuses of a trial, in ranking order."""


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """Final state of one trial.

    Attributes:
        name: Tune's id of the trial, also the suffix of its folder's name.
        parameters: values that the sweep chose for the trial, by dotted path.
        status: ``done``, ``failed``, or ``unfinished`` because the sweep was interrupted.
        iterations: number of training iterations.
        metric: last value of the sweep's metric, which may be infinite or NaN; ``None`` if it was never reported.
        seconds: training time.
        error: first line of the error if the trial failed; else empty.
    """

    name: str
    parameters: dict[str, Any]
    status: str
    iterations: int
    metric: float | None
    seconds: float
    error: str = ""

    @property
    def value(self) -> float | None:
        """The metric if it is finite, else ``None``; used for ranking."""
        return None if self.metric is None or not math.isfinite(self.metric) else self.metric

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; non-finite numbers and objects are converted to strings."""
        plain: dict[str, Any] = finite(asdict(self), replace=lambda name: str(float(name)), default=repr)
        return plain


@dataclass(frozen=True, slots=True)
class Point:
    """Trials that differ only in their seed.

    Attributes:
        parameters: values that the sweep chose, without the seed.
        trials: the trials in ranking order.
        repeats: minimum number of trials of each point of the sweep.
    """

    parameters: dict[str, Any]
    trials: tuple[TrialRecord, ...]
    repeats: int

    @property
    def values(self) -> tuple[float, ...]:
        """Finite metric values of the trials that did not fail."""
        return tuple(trial.value for trial in self.trials if trial.status != FAILED and trial.value is not None)

    @property
    def iterations(self) -> int:
        """Fewest iterations of the trials that did not fail."""
        return min((trial.iterations for trial in self.trials if trial.status != FAILED), default=0)

    @property
    def lacks(self) -> str:
        """Numbers of trials that failed, did not finish, have no finite value or did not start, as text; empty if complete."""
        found = Counter("without a value" if trial.status == DONE else trial.status for trial in self._incomplete)
        found["not started"] = self.repeats - len(self.trials)
        return ", ".join(f"{number} {kind}" for kind, number in found.items() if number > 0)

    @property
    def _incomplete(self) -> list[TrialRecord]:
        return [trial for trial in self.trials if trial.status != DONE or trial.value is None]

    @property
    def mean(self) -> float | None:
        """Mean over the seeds; ``None`` if there are no values."""
        return statistics.fmean(self.values) if self.values else None

    @property
    def half_width(self) -> float | None:
        """Half of the 95 % interval of the mean over seeds (Student's t); ``None`` for a single value or equal values."""
        return half_width(self.values) if len(self.values) > 1 and differ(self.values) else None

    def __str__(self) -> str:
        if self.mean is None:
            return "-"
        if self.half_width is None:
            return f"{self.mean:.4g}"
        return f"{self.mean:.4g} ± {self.half_width:.2g} (n={len(self.values)})"


@dataclass(slots=True)
class SweepResult:
    """Trials of a sweep, best first; :meth:`points` groups trials that differ only in the seed.

    Trials with a finite value rank before trials without a finite value. Within both groups, ``done`` trials rank first.

    Attributes:
        metric: ``/``-joined result key that ranks the trials.
        mode: ``"max"`` or ``"min"``.
        trials: the trials; sorted when the object is created.
        repeats: minimum number of trials of each point.
        not_started: number of trials that an interrupt prevented from starting.
    """

    metric: str
    mode: str
    trials: list[TrialRecord] = field(default_factory=list)
    repeats: int = 1
    not_started: int = 0

    def __post_init__(self) -> None:
        self.trials = sorted(self.trials, key=self._rank_of_trial)

    def _rank_of_trial(self, trial: TrialRecord) -> tuple[Any, ...]:
        return trial.value is None, STATUSES.index(trial.status), self._signed(trial.value), trial.name

    def _rank_of_point(self, point: Point) -> tuple[Any, ...]:
        return point.mean is None, bool(point.lacks), self._signed(point.mean)

    def _signed(self, value: float | None) -> float:
        return (-1 if self.mode == "max" else 1) * (value or 0.0)

    @property
    def failed(self) -> int:
        """Number of trials that ended with an error."""
        return sum(trial.status == FAILED for trial in self.trials)

    @property
    def unfinished(self) -> int:
        """Number of trials that an interrupt stopped or prevented from starting."""
        return sum(trial.status == UNFINISHED for trial in self.trials) + self.not_started

    @property
    def names(self) -> list[str]:
        """Dotted paths of the searched settings, the seed last."""
        found = {name for trial in self.trials for name in trial.parameters}
        return sorted(found, key=lambda name: (name == SEED, name))

    def points(self) -> list[Point]:
        """Return the points: complete points first, then by their mean, best first; the mean excludes failed trials."""
        found: dict[str, list[TrialRecord]] = {}
        for trial in self.trials:
            # Not as JSON: keys of different types cannot be sorted.
            key = repr(sorted(_without_seed(trial.parameters).items()))
            found.setdefault(key, []).append(trial)
        points = [Point(_without_seed(trials[0].parameters), tuple(trials), self.repeats) for trials in found.values()]
        return sorted(points, key=self._rank_of_point)

    def best(self) -> TrialRecord | None:
        """Return the best trial of the best point; ``None`` if every trial failed or has no finite value."""
        ranked = self.points()
        return ranked[0].trials[0] if ranked and ranked[0].values else None

    def dataframe(self) -> pandas.DataFrame:
        """Return one row per trial: its parameters by dotted path, then the fields of :class:`TrialRecord`."""
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
        """Return a rich table with one row per trial."""
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
        """Return a rich table with one row per point, with mean and 95 % interval over seeds.

        Returns ``None`` if no point has several trials.
        """
        points = self.points()
        if len(points) == len(self.trials):
            return None
        names = [name for name in self.names if name != SEED]
        table = Table(title=f"{len(points)} points: mean ± 95 % interval over seeds")
        for name in (*names, self.metric.rpartition("/")[2], "iterations"):
            table.add_column(name, justify="right")
        table.add_column("lacks")
        for index, point in enumerate(points):
            values = [_shown(point.parameters.get(name, "")) for name in names]
            row = [*values, str(point), str(point.iterations), point.lacks]
            table.add_row(*map(_escaped, row), style="bold" if index == 0 and point.mean is not None else None)
        return table

    def save(self, folder: Path) -> None:
        """Write ``sweep.json`` and ``results.csv`` (the rows of :meth:`dataframe`) into the sweep's folder."""
        record = {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "metric": self.metric,
            "mode": self.mode,
            "repeats": self.repeats,
            "not_started": self.not_started,
            "trials": [trial.to_dict() for trial in self.trials],
        }
        write_json(folder / "sweep.json", record)
        write_text(folder / "results.csv", self.dataframe().to_csv(index=False))

    @classmethod
    def load(cls, folder: Path) -> SweepResult:
        """Read the ``sweep.json`` that :meth:`save` wrote.

        Raises:
            CheckpointError: the sweep has not finished, or the file is damaged or of another version.
        """
        path = folder / "sweep.json"
        if not path.is_file():
            raise CheckpointError(
                f"{folder} has no sweep.json: it is not a sweep, or the sweep was interrupted; continue it with --resume."
            )
        record = read_json(path, SCHEMA, SCHEMA_VERSION)
        with checked_content(path):
            trials = [_read_trial(trial) for trial in record["trials"]]
            return cls(record["metric"], record["mode"], trials, record["repeats"], record["not_started"])


def _read_trial(record: dict[str, Any]) -> TrialRecord:
    metric = record["metric"]
    return TrialRecord(**{**record, "metric": None if metric is None else float(metric)})


def _without_seed(parameters: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in parameters.items() if name != SEED}


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _escaped(text: str) -> str:
    """Escape text, such as an error message, that may look like rich markup."""
    from rich.markup import escape

    return escape(text)
