"""Charts of a report as values, each with a table of its numbers, and the curves that they are made of."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from trial_ray.environments.adapter import ACTION_CLASSES
from trial_ray.evaluation.results import protocol_difference
from trial_ray.evaluation.statistics import bootstrap_curve
from trial_ray.metrics import PANEL_SUCCESS
from trial_ray.reports.curves import CURVES, Curve
from trial_ray.reports.groups import RunGroup, recorded_iterations, run_label
from trial_ray.reports.run import RecordedRun
from trial_ray.reports.traces import class_means, readable_trace

DASH = "–"
MOST_ROWS = 120
"""Rows of a chart's table; of a longer curve every k-th iteration is shown."""
WINDOW = 5


def windows(metrics: Sequence[Mapping[str, float]], key: str) -> dict[float, float]:
    """Means of ``key`` over :data:`WINDOW` iterations each, by the middle of the window; where it was not logged there is none.

    Windows do not overlap; the last one of a run may be shorter.
    """
    found: dict[int, list[float]] = {}
    last = 0
    for line in metrics:
        last = int(line["iteration"])
        if key in line:
            found.setdefault((last - 1) // WINDOW, []).append(line[key])
    return {
        (index * WINDOW + 1 + min((index + 1) * WINDOW, last)) / 2: statistics.fmean(values)
        for index, values in found.items()
    }


def curve(metrics: Sequence[Mapping[str, float]], key: str) -> dict[int, float]:
    """Values of ``key`` by the iterations that logged it."""
    return {int(line["iteration"]): line[key] for line in metrics if key in line}


@dataclass(frozen=True, slots=True)
class Table:
    """A table of texts; ``folded`` ones are opened by the reader, those with ``long`` texts wrap them."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    folded: bool = False
    long: bool = False


def curve_chart(key: str, groups: Sequence[RunGroup]) -> dict[str, Any] | None:
    """A chart of one metric, or ``None`` where no run logged it.

    Args:
        key: of the metric.
        groups: of runs.

    Returns:
        ``series``, one entry a group that logged it: per iteration ``mean``, ``low`` and ``high`` over the runs that all have
        the iteration (``low`` and ``high`` are ``None`` for a single run; nothing of runs with different tasks), and under
        ``runs`` the curve of every run.
    """
    spec = CURVES[key]
    series = [found for index, group in enumerate(groups) if (found := _series(key, spec, index, group))]
    if not series:
        return None
    starts = {group.hindsight_start for group in groups if group.hindsight_start and group.hindsight_start > 1}
    return {
        "name": spec.name,
        "title": spec.title,
        "axis": spec.axis,
        "text": spec.text,
        "percent": spec.percent,
        "warm_up": sorted(starts) if spec.section in ("hindsight", "learning") else [],
        "series": series,
        "table": _curve_table(spec, series),
    }


def _series(key: str, spec: Curve, index: int, group: RunGroup) -> dict[str, Any] | None:
    found = [(run, points) for run in group.runs if (points := _points(key, spec, run))]
    if not found:
        return None
    shown = [run for run, _ in found]
    curves = [(run_label(run, group), points) for run, points in found]
    shared = sorted(set.intersection(*(set(points) for _, points in curves)))
    if key == PANEL_SUCCESS and not _one_panel(shown):
        shared = []
    values = np.array([[points[x] for x in shared] for _, points in curves])
    bounds = bootstrap_curve(values) if len(curves) > 1 else None
    return {
        "group": index,
        "name": group.title_of(shown),
        "x": shared,
        "mean": values.mean(0).tolist(),
        "low": None if bounds is None else [low for low, _ in bounds],
        "high": None if bounds is None else [high for _, high in bounds],
        "runs": [{"name": label, "x": list(points), "y": list(points.values())} for label, points in curves],
    }


def _curve_table(spec: Curve, series: Sequence[Mapping[str, Any]]) -> Table:
    form = ".1%" if spec.percent else ".4g"
    columns: list[dict[float, str]] = []
    for each in series:
        texts = [format(mean, form) for mean in each["mean"]]
        if each["low"]:
            bounds = zip(texts, each["low"], each["high"], strict=True)
            texts = [f"{text} [{low:{form}}, {high:{form}}]" for text, low, high in bounds]
        columns.append(dict(zip(each["x"], texts, strict=True)))
    iterations = sorted({x for column in columns for x in column})
    step = math.ceil(len(iterations) / MOST_ROWS) or 1
    shown = sorted({*iterations[::step], *iterations[-1:]})
    every = "" if step == 1 else f", every {step}th iteration"
    return Table(
        f"{spec.title} ({spec.axis}){every}",
        ["iteration", *(each["name"] for each in series)],
        [[f"{x:g}", *(column.get(x, DASH) for column in columns)] for x in shown],
    )


def _points(key: str, spec: Curve, run: RecordedRun) -> dict[float, float]:
    if spec.windowed:
        return windows(run.metrics, key)
    points: dict[float, float] = dict(curve(run.metrics, key).items())
    if key == PANEL_SUCCESS and "" in run.evaluations:  # of the run's only evaluation set
        played = run.evaluations[""]
        newest = played[max(played)]
        points |= {
            iteration: result.success_rate
            for iteration, result in played.items()
            if result.counted and not protocol_difference(result.protocol, newest.protocol)
        }
    return dict(sorted(points.items()))


def _one_panel(runs: Sequence[RecordedRun]) -> bool:
    """Whether the runs were last evaluated under one protocol, as far as they were, so that a mean over them has a meaning."""
    newest = [run.evaluations[""][run.evaluated_after("")].protocol for run in runs if "" in run.evaluations]
    return not any(protocol_difference(protocol, newest[0]) for protocol in newest)


def class_chart(groups: Sequence[RunGroup]) -> dict[str, Any] | None:
    """Figure 3 (b): mean multiplier of every class of action, with its standard error over trajectories.

    The trajectories of all runs of a group count alike.
    """
    series: list[dict[str, Any]] = []
    for index, group in enumerate(groups):
        recorded = [run for run in group.runs if run.allocation]
        traces = [trace for run in recorded if run.allocation for trace in run.allocation.shown]
        if means := class_means(traces):
            series.append({"group": index, "name": group.title_of(recorded), "means": means})
    if not series:
        return None
    runs = [run for group in groups for run in group.runs if run.allocation]
    all_counted = [run.name for run in runs if run.allocation and not any(t.success for t in run.allocation.traces)]
    classes = [name for name in ACTION_CLASSES if any(name in each["means"] for each in series)]
    return {
        "name": "classes",
        "title": "Multiplier by class of action",
        "axis": "mean multiplier",
        "text": f"Mean over successful trajectories of {recorded_iterations(runs)} of their class means; error bars are standard "
        "errors. 1 is the mean of a trajectory."
        + (f" Where none succeeded, all are counted: {', '.join(all_counted)}." if all_counted else ""),
        "classes": classes,
        "series": series,
        "table": Table(
            "Multiplier by class of action: mean ± SEM",
            ["class", *(each["name"] for each in series)],
            [[name, *(_class_cell(each["means"].get(name)) for each in series)] for name in classes],
        ),
    }


def _class_cell(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return DASH
    sem = DASH if found["sem"] is None else f"{found['sem']:.4g}"
    return f"{found['mean']:.3f} ± {sem} ({found['trajectories']} trajectories)"


def profile_chart(groups: Sequence[RunGroup]) -> dict[str, Any] | None:
    """Figure 3 (a): the multipliers of one trajectory, turn by turn, of the first run that recorded some."""
    for run in (run for group in groups for run in group.runs if run.allocation and run.allocation.shown):
        assert run.allocation is not None
        trace = readable_trace(run.allocation.shown)
        rows = [
            [f"T{at}", turn.action, f"{turn.weight:.3f}", f"{turn.score:.3f}", str(turn.tokens), turn.action_class]
            for at, turn in enumerate(trace.turns, start=1)
        ]
        columns = ["turn", "action", "multiplier", "score (nats)", "tokens", "class"]
        if not any(turn.action_class for turn in trace.turns):
            columns, rows = columns[:-1], [row[:-1] for row in rows]
        title = "One trajectory's allocation"
        return {
            "name": "profile",
            "title": title,
            "axis": "multiplier",
            "text": f"Task {trace.task_id} in iteration {run.allocation.iteration} of {run.name}, "
            f"{'solved' if trace.success else 'not solved'}; one bar a turn.",
            "classes": [*ACTION_CLASSES, ""],
            "turns": [asdict(turn) for turn in trace.turns],
            "table": Table(title, columns, rows),
        }
    return None


def all_charts(groups: Sequence[RunGroup]) -> dict[str, list[dict[str, Any]]]:
    """Every chart that has something to show, by section of the page."""
    charts: dict[str, list[dict[str, Any]]] = {}
    for key, spec in CURVES.items():
        if chart := curve_chart(key, groups):
            charts.setdefault(spec.section, []).append(chart)
    charts["allocation"] = [chart for chart in (class_chart(groups), profile_chart(groups)) if chart]
    return charts
