"""Curves over iterations out of ``metrics.jsonl``: windows, means over runs, and how fast methods learn."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trial_ray.errors import UserInputError
from trial_ray.evaluation.statistics import add_adjusted, bootstrap_mean
from trial_ray.evaluation.table_text import DIFFERENCE_COLUMNS, difference_cells
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


SMOOTHED = 5
"""Iterations in a moving mean."""

Curves = Mapping[str, Mapping[int, Mapping[int, float]]]
"""By method, seed and iteration: success."""
_Values = Mapping[str, Mapping[int, Sequence[float]]]
"""By method and seed: success in every iteration, from the first to the last."""


def learning(curves: Curves, reference: str, subject: str) -> dict[str, Any]:
    """Area under the learning curve and iterations to the reference's final success, by method.

    The area is the mean success over all iterations, so that a method that learns sooner has more of it at the same final
    success. Games are new in every iteration and the same for all methods of a seed, which makes differences paired. They need
    two seeds that both methods have: of a single one nothing says how far it is from the next.

    Args:
        curves: of every iteration from the first to the last, the same one for all.
        reference: whose mean success in the last :data:`SMOOTHED` iterations is the one to be reached; differences are to it.
        subject: whose differences to all others are reported as well.

    Raises:
        UserInputError: a curve lacks an iteration that another one has.
    """
    recorded = [iteration for by_seed in curves.values() for values in by_seed.values() for iteration in values]
    last = max(recorded, default=1)
    whole = {
        name: {seed: _whole(values, last, f"seed {seed} of {name}") for seed, values in by_seed.items()}
        for name, by_seed in curves.items()
    }
    goal = statistics.fmean(statistics.fmean(values[-SMOOTHED:]) for values in whole[reference].values())
    methods = {name: _of_method(by_seed, goal) for name, by_seed in whole.items()}
    pairs = [(name, reference) for name in curves if name != reference]
    pairs += [(subject, name) for name in curves if subject in curves and name not in (subject, reference)]
    differences = [
        _difference(whole, name, other) for name, other in pairs if len(curves[name].keys() & curves[other].keys()) > 1
    ]
    add_adjusted(differences)
    return {"success_to_reach": goal, "iterations": last, "methods": methods, "differences": differences}


def _whole(values: Mapping[int, float], last: int, run: str) -> list[float]:
    missing = next((iteration for iteration in range(1, last + 1) if iteration not in values), None)
    if missing is not None:
        raise UserInputError(
            f"Learning curves are averaged over all iterations, but {run} lacks the success of iteration {missing} of {last}. "
            "Compare runs of the same iterations."
        )
    return [values[iteration] for iteration in range(1, last + 1)]


def _of_method(by_seed: Mapping[int, Sequence[float]], goal: float) -> dict[str, Any]:
    areas = {str(seed): statistics.fmean(values) for seed, values in by_seed.items()}
    reached = {str(seed): _first_at(values, goal) for seed, values in by_seed.items()}
    found = [iteration for iteration in reached.values() if iteration is not None]
    return {
        "area": statistics.fmean(areas.values()),
        "area_by_seed": areas,
        "iterations_to_reach": reached,
        "seeds_that_reach": len(found),
        "median_iterations": statistics.median(iteration or np.inf for iteration in reached.values())
        if len(found) * 2 > len(reached)
        else None,
        "curves": {str(seed): list(values) for seed, values in by_seed.items()},
    }


def _first_at(values: Sequence[float], goal: float) -> int | None:
    """The first iteration, from 1, that ends a moving mean of at least ``goal``."""
    for end in range(SMOOTHED, len(values) + 1):
        if statistics.fmean(values[end - SMOOTHED : end]) >= goal:
            return end
    return None


def _difference(curves: _Values, method: str, reference: str) -> dict[str, Any]:
    """Area of ``method`` less that of ``reference`` over the seeds that both have."""
    seeds = sorted(curves[method].keys() & curves[reference].keys())
    areas = [statistics.fmean(curves[method][seed]) - statistics.fmean(curves[reference][seed]) for seed in seeds]
    return {"method": method, "reference": reference, **bootstrap_mean(np.array(areas)[:, None]).to_dict()}


def to_markdown(found: Mapping[str, Any], title: Any = str) -> str:
    """Two tables: area and iterations by method, and differences of areas."""
    goal = f"{100 * found['success_to_reach']:.1f} %"
    lines = [
        f"| Method | Area under the learning curve, % | Iterations to {goal} (median) | Seeds that reach it |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name, of in found["methods"].items():
        median = "–" if of["median_iterations"] is None else f"{of['median_iterations']:g}"
        lines.append(
            f"| {title(name)} | {100 * of['area']:.1f} | {median} | {of['seeds_that_reach']} of {len(of['area_by_seed'])} |"
        )
    lines += [
        "",
        "Differences of areas, bootstrap over seeds, then a paired t-test over seeds:",
        "",
        f"| {' | '.join(DIFFERENCE_COLUMNS)} |",
        f"| --- |{' ---: |' * (len(DIFFERENCE_COLUMNS) - 1)}",
        *(f"| {' | '.join(difference_cells(each, title))} |" for each in found["differences"]),
    ]
    return "\n".join(lines) + "\n"
