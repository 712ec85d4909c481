"""Learning dynamics out of ``metrics.jsonl``: the panel's success, and the mechanism logs in windows of iterations."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trial_ray.errors import UserInputError
from trial_ray.files import read_lines

WINDOW = 5


@dataclass(frozen=True, slots=True)
class Window:
    """The mean of a metric over consecutive iterations.

    Attributes:
        first: iteration that it begins with, counted from 1.
        last: iteration that it ends with; the last window of a run may be shorter.
        mean: arithmetic mean of what was logged.
    """

    first: int
    last: int
    mean: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Every iteration of a run, in order.

    Raises:
        UserInputError: the file is missing or damaged.
    """
    metrics, damaged = read_whole_lines(path)
    if damaged:
        raise UserInputError(f"Cannot read the metrics {path}: {damaged} of its lines are damaged.")
    return metrics


def read_whole_lines(path: Path) -> tuple[list[dict[str, float]], int]:
    """The iterations that can be read, in order, and how many lines cannot: a run that is killed may leave half a line.

    Of an iteration that occurs twice the later line counts. What is not a finite number is left out.

    Raises:
        UserInputError: the file is missing.
    """
    try:
        lines = read_lines(path)
    except OSError as error:
        raise UserInputError(f"Cannot read the metrics {path}: {error}.") from error
    found: dict[int, dict[str, float]] = {}
    damaged = 0
    for line in lines:
        try:
            values = json.loads(line)
            if type(values["iteration"]) is not int:
                raise TypeError("no number of an iteration")
            found[values["iteration"]] = {key: value for key, value in values.items() if _is_number(value)}
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            damaged += 1
    return [found[iteration] for iteration in sorted(found)], damaged


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def windows(metrics: Sequence[Mapping[str, float]], key: str) -> list[Window]:
    """Non-overlapping means of ``key`` over :data:`WINDOW` iterations; windows in which it was not logged are left out."""
    found: dict[int, list[float]] = {}
    last = 0
    for line in metrics:
        iteration = int(line["iteration"])
        last = max(last, iteration)
        if key in line:
            found.setdefault((iteration - 1) // WINDOW, []).append(line[key])
    return [
        Window(index * WINDOW + 1, min((index + 1) * WINDOW, last), statistics.fmean(values))
        for index, values in sorted(found.items())
    ]


def curve(metrics: Sequence[Mapping[str, float]], key: str) -> list[tuple[int, float]]:
    """``(iteration, value)`` of every iteration that logged ``key``."""
    return [(int(line["iteration"]), line[key]) for line in metrics if key in line]


def mean_over_runs(runs: Sequence[Sequence[Window]]) -> list[dict[str, Any]]:
    """Per window the mean over runs and their standard deviation (``None`` for one run), where all of them have it."""
    shared = set.intersection(*({(window.first, window.last) for window in run} for run in runs)) if runs else set()
    result = []
    for first, last in sorted(shared):
        means = [window.mean for run in runs for window in run if (window.first, window.last) == (first, last)]
        std = statistics.stdev(means) if len(means) > 1 else None
        result.append({"first": first, "last": last, "mean": statistics.fmean(means), "std": std, "runs": len(means)})
    return result


def panel_curve(runs: Sequence[Sequence[Mapping[str, float]]], key: str) -> list[dict[str, Any]]:
    """Per iteration at which all runs logged ``key``: their mean, and every run's value."""
    curves = [dict(curve(metrics, key)) for metrics in runs]
    shared = sorted(set.intersection(*map(set, curves)))
    return [
        {"iteration": iteration, "mean": statistics.fmean(values), "runs": values}
        for iteration in shared
        if (values := [found[iteration] for found in curves])
    ]
