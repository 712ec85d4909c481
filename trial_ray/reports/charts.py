"""What the charts of a report show, as plain values: the page draws them, and the figures for papers are made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trial_ray.environments.adapter import ACTION_CLASSES
from trial_ray.evaluation.intervals import bootstrap_curve
from trial_ray.reports.dynamics import PANEL_SUCCESS, PROFILE_STD, TURN_SCORE, curve, windows
from trial_ray.reports.run_groups import RunGroup, run_label
from trial_ray.reports.run_record import RunRecord
from trial_ray.reports.traces import class_means, readable_trace

LEARNER = "learners/default_policy"
SIGNIFICANT = 6
"""Digits of a number in the page."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric over iterations.

    Attributes:
        name: of the chart, in the page and in file names.
        section: of the page.
        title: heading of the chart.
        axis: what is on the vertical axis, with its unit.
        text: what the metric is, in a sentence.
        key: of the metric.
        percent: whether values are shares.
        windowed: whether means over windows of iterations are shown, as in the paper's Figure 2.
        hindsight: whether methods without a hindsight view have no such metric.
    """

    name: str
    section: str
    title: str
    axis: str
    text: str
    key: str
    percent: bool = False
    windowed: bool = False
    hindsight: bool = False


CURVES = (
    Curve(
        "panel",
        "learning",
        "Success on the panel",
        "success",
        "Share of the held-out tasks that were solved, before, during and after training.",
        PANEL_SUCCESS,
        percent=True,
    ),
    Curve(
        "success",
        "learning",
        "Success in training",
        "success",
        "Share of the iteration's rollouts that solved their task.",
        "env_runners/success_rate",
        percent=True,
    ),
    Curve(
        "return",
        "learning",
        "Return",
        "return",
        "Mean over rollouts of the undiscounted sum of the environment's rewards.",
        "env_runners/episode_return_mean",
    ),
    Curve(
        "turns",
        "learning",
        "Turns of a rollout",
        "turns",
        "Mean number of turns that a rollout takes.",
        "env_runners/episode_len_mean",
    ),
    Curve(
        "turn_score",
        "hindsight",
        "Mean turn score",
        "nats per token",
        "How much hindsight revises a turn: mean absolute gap of its tokens (Eq. 5), in windows of 5 iterations.",
        TURN_SCORE,
        windowed=True,
        hindsight=True,
    ),
    Curve(
        "profile_std",
        "hindsight",
        "Spread of the profile",
        "standard deviation",
        "Standard deviation over turns of the multipliers that were applied (Eq. 6), in windows of 5 iterations.",
        PROFILE_STD,
        windowed=True,
        hindsight=True,
    ),
    Curve(
        "saturated",
        "hindsight",
        "Saturated share of the clamp",
        "share of microbatches",
        "Share of microbatches in which the clamp of Eq. 8 took the dense gradient; 0 during warm-up.",
        f"{LEARNER}/trial/clamp_saturated_fraction",
        percent=True,
        hindsight=True,
    ),
    Curve(
        "dense_loss",
        "hindsight",
        "Dense loss",
        "nats per token",
        "The dense hindsight loss (Eq. 7) before coefficient and clamp.",
        f"{LEARNER}/trial/dense_loss",
        hindsight=True,
    ),
    Curve(
        "entropy",
        "policy",
        "Entropy of the policy",
        "nats per token",
        "Mean over tokens.",
        f"{LEARNER}/grpo/entropy",
    ),
    Curve(
        "kl",
        "policy",
        "KL divergence of the policy",
        "nats per token",
        "From the frozen reference; without a reference model, from the policy before the update.",
        f"{LEARNER}/grpo/kl",
    ),
    Curve(
        "clip_fraction",
        "policy",
        "Clipped tokens",
        "share of tokens",
        "Share of tokens whose ratio lies outside of the clip range.",
        f"{LEARNER}/grpo/clip_fraction",
        percent=True,
    ),
    Curve(
        "engine_ratio",
        "engine",
        "Mean importance ratio",
        "learner / engine",
        "Probability of the sampled tokens under the learner before the update, over that under the engine's policy.",
        f"{LEARNER}/engine/ratio_mean",
    ),
    Curve(
        "engine_ratio_max",
        "engine",
        "Largest importance ratio",
        "learner / engine",
        "The same ratio, its largest value in the iteration.",
        f"{LEARNER}/engine/ratio_max",
    ),
    Curve(
        "engine_kl",
        "engine",
        "KL divergence of engine and learner",
        "nats per token",
        "Estimated from the same ratios.",
        f"{LEARNER}/engine/kl",
    ),
    Curve(
        "sample_size",
        "engine",
        "Effective sample size",
        "share of tokens",
        "1 where all ratios are equal.",
        f"{LEARNER}/engine/effective_sample_size",
        percent=True,
    ),
)


def curve_chart(spec: Curve, groups: Sequence[RunGroup]) -> dict[str, Any] | None:
    """A chart of one metric, or ``None`` where no run logged it.

    Returns:
        ``series``, one entry a group that logged it: per iteration ``mean``, ``low`` and ``high`` over the runs that all have
        the iteration (``low`` and ``high`` are ``None`` for a single run), and under ``runs`` the curve of every run.
    """
    series = [found for index, group in enumerate(groups) if (found := _series(spec, index, group))]
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


def _series(spec: Curve, index: int, group: RunGroup) -> dict[str, Any] | None:
    curves = [(run_label(run, group), _points(spec, run)) for run in group.runs]
    curves = [(label, points) for label, points in curves if points]
    if not curves:
        return None
    shared = sorted(set.intersection(*(set(points) for _, points in curves)))
    values = np.array([[points[x] for x in shared] for _, points in curves])
    bounds = bootstrap_curve(values) if len(curves) > 1 else None
    return {
        "group": index,
        "name": group.title,
        "x": [rounded(x) for x in shared],
        "mean": [rounded(mean) for mean in values.mean(0)],
        "low": None if bounds is None else [rounded(low) for low, _ in bounds],
        "high": None if bounds is None else [rounded(high) for _, high in bounds],
        "runs": [
            {"name": label, "x": [rounded(x) for x in points], "y": [rounded(y) for y in points.values()]}
            for label, points in curves
        ],
    }


def _points(spec: Curve, run: RunRecord) -> dict[float, float]:
    if spec.windowed:
        return {(window.first + window.last) / 2: window.mean for window in windows(run.metrics, spec.key)}
    points: dict[float, float] = dict(curve(run.metrics, spec.key))
    if spec.key == PANEL_SUCCESS:
        for iteration, played in ((0, run.before), (run.iterations, run.after)):
            if "" in played and played[""].counted:  # of the run's only panel
                points[iteration] = played[""].success_rate
    return dict(sorted(points.items()))


def class_chart(groups: Sequence[RunGroup]) -> dict[str, Any] | None:
    """Figure 3 (b): mean multiplier of every class of action, with its standard error over trajectories.

    The trajectories of all runs of a group count alike.
    """
    series = []
    for index, group in enumerate(groups):
        traces = [trace for run in group.runs if run.allocation for trace in run.allocation.shown]
        means = class_means(traces)
        if means:
            found = [means.get(name) for name in ACTION_CLASSES]
            series.append(
                {
                    "group": index,
                    "name": group.title,
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
        "text": "Mean over successful trajectories of their class means; error bars are standard errors. 1 is the mean of a "
        "trajectory." + (f" Where none succeeded, all are counted: {', '.join(all_counted)}." if all_counted else ""),
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
    for spec in CURVES:
        if chart := curve_chart(spec, groups):
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
            parts.append(f"{series['name']}: its runs have no iteration in common")
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
