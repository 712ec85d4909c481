"""Results of a sweep: trials, points (trials that differ only in the seed), and tables of both."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from trial_ray.errors import CheckpointError
from trial_ray.evaluation.statistics import differ, half_width
from trial_ray.files import Json, checked_content, finite, read_json, write_json, write_text
from trial_ray.sweeps.space import SEED

if TYPE_CHECKING:
    import pandas

SCHEMA = "trial_ray/sweep"
SCHEMA_VERSION = 2
DONE, UNFINISHED, FAILED = STATUSES = ("done", "unfinished", "failed")
"""Statuses of a trial, in ranking order."""
POINT_COLUMNS = ("mean", "half_width", "trials", "iterations", "lacks", "best")


@dataclass(frozen=True)
class TrialRecord:
    """Final state of one trial.

    Attributes:
        name: Tune's id of the trial; for a trial of a study, or one that never started, the name of its folder.
        parameters: values that the sweep chose for the trial, by dotted path.
        status: ``done``, ``failed``, or ``unfinished`` because the sweep was interrupted.
        iterations: number of training iterations.
        metric: last value of the sweep's metric, which may be infinite or NaN; ``None`` if it was never reported.
        seconds: training time.
        error: first line of the error if the trial failed; else empty.
    """

    name: str
    parameters: Json
    status: str
    iterations: int
    metric: float | None
    seconds: float
    error: str = ""

    @property
    def value(self) -> float | None:
        """The metric if it is finite, else ``None``; used for ranking."""
        return None if self.metric is None or not math.isfinite(self.metric) else self.metric


@dataclass
class SweepResult:
    """Trials of a sweep, best first.

    Trials with a finite value rank before trials without a finite value. Within both groups, ``done`` trials rank first.

    Attributes:
        metric: ``/``-joined result key that ranks the trials.
        mode: ``"max"`` or ``"min"``.
        trials: the trials; sorted when the object is created.
        repeats: minimum number of trials of each point; trials of a point differ only in the seed.
        not_started: number of trials that an interrupt prevented from starting.
    """

    metric: str
    mode: str
    trials: list[TrialRecord] = field(default_factory=list)
    repeats: int = 1
    not_started: int = 0

    def __post_init__(self) -> None:
        def rank(trial: TrialRecord) -> tuple[Any, ...]:
            return trial.value is None, STATUSES.index(trial.status), self._sign * (trial.value or 0.0), trial.name

        self.trials = sorted(self.trials, key=rank)

    @property
    def _sign(self) -> int:
        return -1 if self.mode == "max" else 1

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
        names = {name for trial in self.trials for name in trial.parameters}
        return sorted(names, key=lambda name: (name == SEED, name))

    def dataframe(self) -> pandas.DataFrame:
        """Return one row per trial: its parameters by dotted path, then the fields of :class:`TrialRecord`."""
        import pandas

        names, fields = self.names, ("status", "iterations", "seconds", "error")
        rows = [
            (trial.name, *map(trial.parameters.get, names), trial.metric, *(getattr(trial, name) for name in fields))
            for trial in self.trials
        ]
        return pandas.DataFrame(rows, columns=["trial", *names, self.metric, *fields])

    def points(self) -> pandas.DataFrame:
        """Return one row per point (trials that differ only in the seed): complete points first, then by mean, best first.

        The columns are the searched settings except the seed, and then ``mean``, the mean of the metric's finite values over
        trials that did not fail; ``half_width``, half of the mean's 95 % interval over seeds (Student's t), or NaN for a single
        value or equal values; ``trials``, the number of these values; ``iterations``, the minimum over trials that did not
        fail; ``lacks``, a text with the numbers of trials that failed, did not finish, have no finite value or did not start
        (empty if the point is complete); and ``best``, the name of the best trial.
        """
        import pandas

        names = [name for name in self.names if name != SEED]
        points: dict[str, list[TrialRecord]] = {}
        for trial in self.trials:
            point = repr(sorted((name, value) for name, value in trial.parameters.items() if name != SEED))
            points.setdefault(point, []).append(trial)
        rows = []
        for trials in points.values():
            counted = [trial for trial in trials if trial.status != FAILED]
            values = pandas.Series([trial.value for trial in counted], dtype=float).dropna()
            rows.append(
                {
                    **{name: trials[0].parameters.get(name) for name in names},
                    "mean": values.mean(),
                    "half_width": half_width(values) if len(values) > 1 and differ(values) else math.nan,
                    "trials": len(values),
                    "iterations": min((trial.iterations for trial in counted), default=0),
                    "lacks": self._lacks(trials),
                    "best": trials[0].name,
                }
            )
        rows.sort(
            key=lambda row: (not row["trials"], row["lacks"] != "", self._sign * row["mean"] if row["trials"] else 0)
        )
        return pandas.DataFrame(rows, columns=[*names, *POINT_COLUMNS])

    def _lacks(self, trials: Sequence[TrialRecord]) -> str:
        incomplete = [trial for trial in trials if trial.status != DONE or trial.value is None]
        kinds = Counter("without a value" if trial.status == DONE else trial.status for trial in incomplete)
        kinds["not started"] = self.repeats - len(trials)
        return ", ".join(f"{number} {kind}" for kind, number in kinds.items() if number > 0)

    def best(self) -> TrialRecord | None:
        """Return the best trial of the best point; ``None`` if every trial failed or has no finite value."""
        points = self.points()
        names = points["best"][points["trials"] > 0]
        return next((trial for trial in self.trials if trial.name in names[:1].to_list()), None)

    def table(self) -> Table:
        """Return a rich table with one row per trial."""
        frame = self.dataframe()
        if not self.failed:
            frame = frame.drop(columns="error")
        return _rich_table(f"{len(self.trials)} trials by {self.metric} ({self.mode})", frame)

    def points_table(self) -> Table | None:
        """Return a rich table with one row per point; ``None`` if no point has several trials."""
        points = self.points()
        if len(points) == len(self.trials):
            return None
        return _rich_table(f"{len(points)} points: mean ± half_width, the 95 % interval over seeds", points)

    def save(self, folder: Path) -> None:
        """Write ``sweep.json`` and ``results.csv`` (the rows of :meth:`dataframe`) into the sweep's folder."""
        # Write infinite numbers, NaN and objects that JSON cannot represent as texts.
        record = finite(asdict(self), replace=lambda name: str(float(name)), default=repr)
        write_json(folder / "sweep.json", {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, **record})
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
            trials = [
                TrialRecord(**{**trial, "metric": None if trial["metric"] is None else float(trial["metric"])})
                for trial in record["trials"]
            ]
            return cls(record["metric"], record["mode"], trials, record["repeats"], record["not_started"])


def _rich_table(title: str, frame: pandas.DataFrame) -> Table:
    """Return a frame as a rich table with the first row in bold; texts such as error messages are not read as markup."""
    table = Table(title=title)
    for name in frame:
        table.add_column(name.rpartition("/")[2], overflow="fold")
    for number, row in enumerate(frame.itertuples(index=False)):
        table.add_row(*(Text(_cell(value)) for value in row), style="bold" if number == 0 else None)
    return table


def _cell(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
