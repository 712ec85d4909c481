"""A report's charts as files for papers, PNG and SVG, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trial_ray.environments.adapter import ACTION_CLASSES
from trial_ray.metrics import CURVES, PROFILE_STD, TURN_SCORE
from trial_ray.reports.charts import curve_chart
from trial_ray.reports.dynamics import mean_over_runs, windows
from trial_ray.reports.plots import plot_allocation, plot_curve, plot_dynamics
from trial_ray.reports.records import RunGroup, recorded_iterations
from trial_ray.reports.traces import class_means, readable_trace

FORMATS = ("png", "svg")


def write_figures(groups: Sequence[RunGroup], folder: Path) -> list[Path]:
    """Write every curve that the runs logged, and the paper's Figures 2 and 3 as far as they can be made.

    Returns:
        The files: ``<chart>.png`` and ``.svg``, ``figure2``, and of every group with turn weights a ``figure3``.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    charts = {spec.name: chart for key, spec in CURVES.items() if (chart := curve_chart(key, groups))}
    written = [path for name, chart in charts.items() for path in plot_curve(chart, *_files(folder, name))]
    if {"panel", "turn_score", "profile_std"} <= charts.keys():
        written += plot_dynamics(_dynamics(groups, charts["panel"]), *_files(folder, "figure2"))
    found = [(group, data) for group in groups if (data := _allocation(group))]
    for number, (_, data) in enumerate(found, start=1):
        written += plot_allocation(data, *_files(folder, "figure3" if len(found) == 1 else f"figure3_{number}"))
    return written


def _files(folder: Path, name: str) -> list[Path]:
    return [folder / f"{name}.{suffix}" for suffix in FORMATS]


def _dynamics(groups: Sequence[RunGroup], panel: Mapping[str, Any]) -> dict[str, Any]:
    runs = [run for group in groups for run in group.runs]
    starts = [group.hindsight_start for group in groups if group.hindsight_start is not None]
    data: dict[str, Any] = {
        "title": "; ".join(group.title for group in groups),
        "iterations": max(run.iterations for run in runs),
        "hindsight_start_iteration": min(starts, default=1),
        # As for the other two: a mean over all runs of the group, or none.
        "panel": {
            groups[series["group"]].title: _panel_points(series)
            for series in panel["series"]
            if len(series["runs"]) == len(groups[series["group"]].runs)
        },
    }
    for name, key in (("turn_score", TURN_SCORE), ("profile_std", PROFILE_STD)):
        means = {group.title: mean_over_runs([windows(run.metrics, key) for run in group.runs]) for group in groups}
        data[name] = {title: found for title, found in means.items() if found}
    return data


def _panel_points(series: Mapping[str, Any]) -> list[dict[str, Any]]:
    runs = [dict(zip(run["x"], run["y"], strict=True)) for run in series["runs"]]
    return [
        {"iteration": x, "mean": mean, "runs": [run[x] for run in runs]}
        for x, mean in zip(series["x"], series["mean"], strict=True)
        if x >= 1  # the figure begins with the first iteration
    ]


def _allocation(group: RunGroup) -> dict[str, Any] | None:
    runs = [run for run in group.runs if run.allocation and run.allocation.shown]
    found = [run.allocation.shown for run in runs if run.allocation]
    if not found:
        return None
    traces = [trace for shown in found for trace in shown]
    return {
        "title": f"{group.title_of(runs)}: {len(traces)} trajectories of {recorded_iterations(runs)}",
        "class_order": list(ACTION_CLASSES),
        "classes": class_means(traces),
        "example": readable_trace(found[0]).to_dict(),
    }
