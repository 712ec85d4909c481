"""How fast methods learn: success of the training rollouts, each on games that no update has seen, iteration by iteration."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trial_ray.errors import UserInputError
from trial_ray.evaluation.statistics import add_adjusted, bootstrap_mean
from trial_ray.evaluation.table_text import DIFFERENCE_COLUMNS, difference_cells

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
        "curve": np.mean([list(values) for values in by_seed.values()], axis=0).tolist(),
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
