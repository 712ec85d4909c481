"""What the charts of a report show, as plain values: the page draws them, and the figures for papers are made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trial_ray.environments.adapter import ACTION_CLASSES
from trial_ray.evaluation.statistics import bootstrap_curve
from trial_ray.metrics import CURVES, PANEL_SUCCESS, Curve
from trial_ray.reports.dynamics import curve, windows
from trial_ray.reports.records import RunGroup, RunRecord, recorded_iterations, run_label
from trial_ray.reports.traces import class_means, readable_trace

SIGNIFICANT = 6
"""Digits of a number in the page."""


def curve_chart(key: str, groups: Sequence[RunGroup]) -> dict[str, Any] | None:
    """A chart of one metric, or ``None`` where no run logged it.

    Returns:
        ``series``, one entry a group that logged it: per iteration ``mean``, ``low`` and ``high`` over the runs that all have
        the iteration (``low`` and ``high`` are ``None`` for a single run; nothing of runs with different panels), and under
        ``runs`` the curve of every run.
    """
    spec = CURVES[key]
    series = [found for index, group in enumerate(groups) if (found := _series(key, spec, index, group))]
    if not series:
        return None
    starts = {group.hindsight_start for group in groups if group.hindsight_start and group.hindsight_start > 1}
    return {
        "name": spec.name,
        "kind": "curve",
        "title": spec.title,
        "axis": spec.axis,
        "text": spec.text,
        "percent": spec.percent,
        "warm_up": sorted(starts) if spec.hindsight or spec.section == "learning" else [],
        "series": series,
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
        "x": [rounded(x) for x in shared],
        "mean": [rounded(mean) for mean in values.mean(0)],
        "low": None if bounds is None else [rounded(low) for low, _ in bounds],
        "high": None if bounds is None else [rounded(high) for _, high in bounds],
        "runs": [
            {"name": label, "x": [rounded(x) for x in points], "y": [rounded(y) for y in points.values()]}
            for label, points in curves
        ],
    }


def _points(key: str, spec: Curve, run: RunRecord) -> dict[float, float]:
    if spec.windowed:
        return {(window.first + window.last) / 2: window.mean for window in windows(run.metrics, key)}
    points: dict[float, float] = dict(curve(run.metrics, key))
    if key == PANEL_SUCCESS and "" in run.evaluations:  # of the run's only panel
        played = run.evaluations[""]
        newest = played[max(played)]
        points |= {
            iteration: result.success_rate
            for iteration, result in played.items()
            if result.counted and result.protocol == newest.protocol
        }
    return dict(sorted(points.items()))


def _one_panel(runs: Sequence[RunRecord]) -> bool:
    """Whether the runs were last evaluated under one protocol, as far as they were, so that a mean over them has a meaning."""
    newest = [run.evaluations[""][run.evaluated_after("")].protocol for run in runs if "" in run.evaluations]
    return all(protocol == newest[0] for protocol in newest)


def class_chart(groups: Sequence[RunGroup]) -> dict[str, Any] | None:
    """Figure 3 (b): mean multiplier of every class of action, with its standard error over trajectories.

    The trajectories of all runs of a group count alike.
    """
    series = []
    for index, group in enumerate(groups):
        recorded = [run for run in group.runs if run.allocation]
        traces = [trace for run in recorded if run.allocation for trace in run.allocation.shown]
        means = class_means(traces)
        if means:
            found = [means.get(name) for name in ACTION_CLASSES]
            series.append(
                {
                    "group": index,
                    "name": group.title_of(recorded),
                    "mean": [None if cell is None else rounded(cell["mean"]) for cell in found],
                    "sem": [None if cell is None else rounded(cell["sem"]) for cell in found],
                    "trajectories": [0 if cell is None else cell["trajectories"] for cell in found],
                }
            )
    if not series:
        return None
    runs = [run for group in groups for run in group.runs if run.allocation]
    all_counted = [run.name for run in runs if run.allocation and not any(t.success for t in run.allocation.traces)]
    return {
        "name": "classes",
        "kind": "classes",
        "title": "Multiplier by class of action",
        "axis": "mean multiplier",
        "text": f"Mean over successful trajectories of {recorded_iterations(runs)} of their class means; error bars are standard "
        "errors. 1 is the mean of a trajectory."
        + (f" Where none succeeded, all are counted: {', '.join(all_counted)}." if all_counted else ""),
        "classes": list(ACTION_CLASSES),
        "series": series,
    }


def profile_chart(groups: Sequence[RunGroup]) -> dict[str, Any] | None:
    """Figure 3 (a): the multipliers of one trajectory, turn by turn, of the first run that recorded some."""
    for index, group in enumerate(groups):
        for run in group.runs:
            if run.allocation and run.allocation.shown:
                trace = readable_trace(run.allocation.shown)
                return {
                    "name": "profile",
                    "kind": "profile",
                    "title": "One trajectory's allocation",
                    "axis": "multiplier",
                    "text": f"Task {trace.task_id} in iteration {run.allocation.iteration} of {run.name}, "
                    f"{'solved' if trace.success else 'not solved'}; one bar a turn.",
                    "group": index,
                    "classes": list(ACTION_CLASSES),
                    "turns": [
                        {
                            "action": turn.action,
                            "outcome": turn.outcome,
                            "class": turn.action_class,
                            "score": rounded(turn.score),
                            "weight": rounded(turn.weight),
                            "tokens": turn.tokens,
                        }
                        for turn in trace.turns
                    ],
                }
    return None


def time_chart(groups: Sequence[RunGroup]) -> dict[str, Any] | None:
    """Where the time of every run went."""
    runs = [(group, run) for group in groups for run in group.runs if run.seconds]
    if not runs:
        return None
    phases = list(dict.fromkeys(phase for _, run in runs for phase in run.seconds))
    return {
        "name": "time",
        "kind": "time",
        "title": "Where the time went",
        "axis": "seconds",
        "text": "Seconds of the driver's clock by phase; every second falls into one of them.",
        "rows": [f"{group.name}, {run_label(run, group)}" for group, run in runs],
        "groups": [groups.index(group) for group, _ in runs],
        "series": [
            {"name": phase, "values": [rounded(run.seconds.get(phase, 0.0)) for _, run in runs]} for phase in phases
        ],
    }


def rounded(value: Any) -> Any:
    """A number with as many digits as a reader of the page can use."""
    if value is None or isinstance(value, int):
        return value
    return float(f"{value:.{SIGNIFICANT}g}")


def all_charts(groups: Sequence[RunGroup]) -> dict[str, list[dict[str, Any]]]:
    """Every chart that has something to show, by section of the page."""
    charts: dict[str, list[dict[str, Any]]] = {name: [] for name in ("learning", "hindsight", "policy", "engine")}
    for key, spec in CURVES.items():
        if chart := curve_chart(key, groups):
            charts[spec.section].append(chart)
    charts["allocation"] = [chart for chart in (class_chart(groups), profile_chart(groups)) if chart]
    charts["time"] = [chart for chart in (time_chart(groups),) if chart]
    return charts


def describe_chart(chart: Mapping[str, Any]) -> str:
    """A chart in words, for those who do not see it."""
    return f"{chart['title']}. {_DESCRIPTIONS[chart['kind']](chart)}"


def _describe_curve(chart: Mapping[str, Any]) -> str:
    def said(value: float) -> str:
        return f"{value:.1%}" if chart["percent"] else f"{value:.4g}"

    parts = []
    for series in chart["series"]:
        x, mean = series["x"], series["mean"]
        if len(x) > 1:
            parts.append(
                f"{series['name']}: {said(mean[0])} at iteration {x[0]:g}, {said(mean[-1])} at iteration {x[-1]:g}"
            )
        elif x:
            parts.append(f"{series['name']}: {said(mean[0])} at iteration {x[0]:g}")
        else:
            parts.append(f"{series['name']}: its runs have no point in common that could be averaged")
    return f"Lines over iterations. {'; '.join(parts)}."


def _describe_classes(chart: Mapping[str, Any]) -> str:
    parts = [
        f"{series['name']}: "
        + ", ".join(
            f"{name} {mean:.2f}"
            for name, mean in zip(chart["classes"], series["mean"], strict=True)
            if mean is not None
        )
        for series in chart["series"]
    ]
    return f"Bars with error bars. {'; '.join(parts)}."


def _describe_profile(chart: Mapping[str, Any]) -> str:
    weights = [turn["weight"] for turn in chart["turns"]]
    return f"Bars, one for each of {len(weights)} turns, from {min(weights):.2f} to {max(weights):.2f}."


def _describe_time(chart: Mapping[str, Any]) -> str:
    totals = {series["name"]: sum(series["values"]) for series in chart["series"]}
    whole = sum(totals.values()) or 1.0
    largest = sorted(totals, key=lambda name: -totals[name])[:3]
    return f"Stacked bars, one a run. Most of the time: {', '.join(f'{name} {totals[name] / whole:.0%}' for name in largest)}."


_DESCRIPTIONS = {
    "curve": _describe_curve,
    "classes": _describe_classes,
    "profile": _describe_profile,
    "time": _describe_time,
}
