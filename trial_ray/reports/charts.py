"""Numbers and texts of a report's charts: curves of metrics, turn weights by action class, and turn weights of a trajectory."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from trial_ray.adapters.adapter import ACTION_CLASSES
from trial_ray.evaluation.results import protocol_difference
from trial_ray.evaluation.statistics import bootstrap_curve
from trial_ray.files import Json, Numbers
from trial_ray.metrics import ENV_RUNNERS, EVALUATION, EVALUATION_SUCCESS, LEARNER
from trial_ray.reports.groups import RunGroup, run_label
from trial_ray.runs.reader import RecordedRun
from trial_ray.runs.recorded_trajectory import RecordedTrajectory

DASH = "–"
MAX_ROWS = 120
"""Maximum number of rows in a curve's table; a longer curve's table has every second iteration, or every third, and so on."""
WINDOW = 5
READABLE_TURNS = range(10, 26)
"""Lengths, in turns, of trajectories that are easy to read in a figure."""


# -- curves ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """The chart of a metric in reports.

    Attributes:
        name: name of the chart, in the report's page and in file names.
        section: section of the report's page that contains the chart.
        title: heading of the chart.
        axis: label of the vertical axis, with its unit.
        text: description of the metric in one sentence.
        percent: whether values are shares, shown in percent.
        windowed: whether means over :data:`WINDOW` iterations are shown, as in the TRIAL paper's Figure 2.
        relative: whether values are divided by the first value of the run.
    """

    name: str
    section: str
    title: str
    axis: str
    text: str
    percent: bool = False
    windowed: bool = False
    relative: bool = False


CURVES = {
    f"{EVALUATION}success_rate": Curve(
        "evaluation",
        "learning",
        "Success on the evaluation set",
        "success",
        "Share of the evaluation set's episodes that were solved; failed episodes are excluded throughout.",
        percent=True,
    ),
    f"{ENV_RUNNERS}success_rate": Curve(
        "success",
        "learning",
        "Success in training",
        "success",
        "Share of episodes that solved their task.",
        percent=True,
    ),
    "tasks/effective_fraction": Curve(
        "tasks",
        "learning",
        "Tasks that are sampled",
        "share of tasks",
        "Effective number of tasks by their sampling probabilities, of all tasks; 100 % if all are equally likely.",
        percent=True,
    ),
    f"{ENV_RUNNERS}episode_return_mean": Curve(
        "return", "learning", "Return", "return", "Mean over episodes of the undiscounted sum of rewards."
    ),
    f"{ENV_RUNNERS}episode_len_mean": Curve(
        "turns", "learning", "Turns of a rollout", "turns", "Mean over episodes of the turns taken."
    ),
    f"{LEARNER}trial/dense_loss": Curve(
        "dense_loss",
        "hindsight",
        "Dense loss",
        "nats per token",
        "The dense hindsight loss (TRIAL paper, Eq. 7) before coefficient and clamp.",
    ),
    f"{LEARNER}trial/turn_score_mean": Curve(
        "turn_score",
        "hindsight",
        "Mean turn score",
        "nats per token",
        "Mean absolute hindsight gap of a turn's tokens (TRIAL paper, Eq. 5), in windows of 5 iterations.",
        windowed=True,
    ),
    f"{LEARNER}trial/turn_weight_std": Curve(
        "profile_std",
        "hindsight",
        "Deviation of the turn weights",
        "standard deviation",
        "Standard deviation over turns of the weights of turns (TRIAL paper, Eq. 6), in windows of 5 iterations.",
        windowed=True,
    ),
    f"{LEARNER}trial/clamp_saturated_fraction": Curve(
        "saturated",
        "hindsight",
        "Saturated share of the clamp",
        "share of microbatches",
        "Share of microbatches in which the clamp (TRIAL paper, Eq. 8) removed the dense gradient; 0 during warm-up.",
        percent=True,
    ),
    f"{LEARNER}trial/gradient_ratio": Curve(
        "gradient_ratio",
        "hindsight",
        "Gradient of the dense term",
        "dense / outcome",
        "Norm of its gradient with respect to the logits, over that of the outcome loss.",
    ),
    f"{LEARNER}grpo/entropy": Curve(
        "entropy",
        "policy",
        "Entropy of the policy",
        "of the first iteration's",
        "Mean over tokens, relative to the run's first iteration.",
        relative=True,
    ),
    f"{LEARNER}grpo/kl": Curve(
        "kl",
        "policy",
        "KL divergence of the policy",
        "nats per token",
        "From the frozen reference; without a reference model, from the policy before the update.",
    ),
    f"{LEARNER}grpo/clip_fraction": Curve(
        "clip_fraction",
        "policy",
        "Clipped tokens",
        "share of tokens",
        "Share of tokens whose ratio is outside the clip range.",
        percent=True,
    ),
    f"{LEARNER}engine/ratio_mean": Curve(
        "engine_ratio",
        "engine",
        "Mean importance ratio",
        "learner / engine",
        "Probability of the sampled tokens under the learner before the update, over that under the engine's policy.",
    ),
    f"{LEARNER}engine/ratio_max": Curve(
        "engine_ratio_max",
        "engine",
        "Largest importance ratio",
        "learner / engine",
        "Largest importance ratio of a token in the iteration.",
    ),
    f"{LEARNER}engine/kl": Curve(
        "engine_kl",
        "engine",
        "KL divergence of engine and learner",
        "nats per token",
        "Estimated from the importance ratios.",
    ),
    f"{LEARNER}engine/effective_sample_size": Curve(
        "sample_size",
        "engine",
        "Effective sample size",
        "share of tokens",
        "1 where all ratios are equal.",
        percent=True,
    ),
}
"""Charts of metrics by the metric's key, in their order on a report's page."""


def windows(metrics: Sequence[Numbers], key: str) -> dict[float, float]:
    """Return the means of a metric over windows of :data:`WINDOW` iterations, by the middle iteration of the window.

    Windows without a logged value are omitted. Windows do not overlap; the last window of a run may be shorter.

    Args:
        metrics: metrics of a run, one mapping per iteration.
        key: key of the metric.
    """
    last = max((int(line["iteration"]) for line in metrics), default=0)
    by_middle: dict[float, list[float]] = {}
    for iteration, value in curve(metrics, key).items():
        first = iteration - (iteration - 1) % WINDOW
        by_middle.setdefault((first + min(first + WINDOW - 1, last)) / 2, []).append(value)
    return {middle: statistics.fmean(values) for middle, values in by_middle.items()}


def curve(metrics: Sequence[Numbers], key: str) -> dict[float, float]:
    """Return the values of the metric ``key`` by iteration, for the iterations that logged it."""
    return {int(line["iteration"]): line[key] for line in metrics if key in line}


def curve_chart(key: str, groups: Sequence[RunGroup]) -> Json | None:
    """Return the chart of one metric, or ``None`` if no run logged it.

    Args:
        key: key of the metric.
        groups: groups of runs.

    Returns:
        The attributes of the :class:`Curve`, and further entries. ``series`` has one entry per group that logged the metric. An
        entry contains the mean over the group's runs (``mean``) and the ends of the mean's 95 % interval (``low``, ``high``)
        for the iterations ``x`` that all these runs have, and the curve of every run (``runs``). ``low`` and ``high`` are
        ``None`` for a single run. If the runs' evaluation protocols differ, the chart of the evaluation success has empty lists
        ``x``, ``mean``, ``low`` and ``high``. ``iterations`` has the iterations in the chart's table, which are
        every ``step``-th one, counted back from the last. ``warm_up`` has the iterations at which the groups' dense loss starts,
        except iteration 1; it is empty outside the sections ``hindsight`` and ``learning``.
    """
    spec = CURVES[key]
    series = [curves for index, group in enumerate(groups) if (curves := _series(key, index, group))]
    if not series:
        return None
    starts = {group.runs[0].config.hindsight_start or 1 for group in groups} - {1}
    warm_up = sorted(starts) if spec.section in ("hindsight", "learning") else []
    iterations = sorted({x for curves in series for x in curves["x"]})
    step = math.ceil(len(iterations) / MAX_ROWS) or 1
    shown = iterations[::-step][::-1]
    return {**asdict(spec), "warm_up": warm_up, "series": series, "step": step, "iterations": shown}


def _series(key: str, index: int, group: RunGroup) -> Json | None:
    curves = [(run, points) for run in group.runs if (points := _points(key, run))]
    if not curves:
        return None
    shown = [run for run, _ in curves]
    shared = sorted(set.intersection(*(set(points) for _, points in curves)))
    if key == EVALUATION_SUCCESS and not _have_one_protocol(shown):
        shared = []
    values = np.array([[points[x] for x in shared] for _, points in curves])
    low, high = bootstrap_curve(values).T.tolist() if len(curves) > 1 else (None, None)
    return {
        "group": index,
        "name": group.title_of(shown),
        "x": shared,
        "mean": values.mean(0).tolist(),
        "low": low,
        "high": high,
        "runs": [
            {"name": run_label(run, group), "x": list(points), "y": list(points.values())} for run, points in curves
        ],
    }


def _points(key: str, run: RecordedRun) -> dict[float, float]:
    if CURVES[key].windowed:
        return windows(run.metrics, key)
    points = curve(run.metrics, key)
    if key == EVALUATION_SUCCESS and "" in run.evaluations:  # The key "" means that the run has one evaluation set.
        newest = run.evaluations[""][run.evaluated_after("")]
        points |= {
            iteration: result.success_rate
            for iteration, result in run.evaluations[""].items()
            if result.counted and not protocol_difference(result.protocol, newest.protocol)
        }
    points = dict(sorted(points.items()))
    if CURVES[key].relative and points:
        first = next(iter(points.values()))
        return {iteration: value / first for iteration, value in points.items()} if first else {}
    return points


def _have_one_protocol(runs: Sequence[RecordedRun]) -> bool:
    """Return True if the runs' newest evaluations have the same evaluation protocol, so their success rates can be averaged.

    Runs without evaluations, or with several evaluation sets, are ignored.
    """
    newest = [run.evaluations[""][run.evaluated_after("")].protocol for run in runs if "" in run.evaluations]
    return not any(protocol_difference(protocol, newest[0]) for protocol in newest)


# -- weights of turns ----------------------------------------------------------------------------------------------------


def class_means(trajectories: Sequence[RecordedTrajectory]) -> dict[str, Json]:
    """Return the mean turn weight of every action class, with its standard error and the number of trajectories.

    The mean and the error are over trajectories: each trajectory with actions of the class counts once, with the mean weight of
    these actions. The error is ``None`` if there is only one such trajectory.
    """
    cells: dict[str, Json] = {}
    for name in ACTION_CLASSES:
        weights = (
            [turn.turn_weight for turn in played.turns if turn.action_class == name and turn.turn_weight is not None]
            for played in trajectories
        )
        means = [np.mean(values) for values in weights if values]
        if means:
            sem = float(np.std(means, ddof=1) / np.sqrt(len(means))) if len(means) > 1 else None
            cells[name] = {"mean": float(np.mean(means)), "sem": sem, "trajectories": len(means)}
    return cells


def class_chart(groups: Sequence[RunGroup]) -> Json | None:
    """Return the chart of the TRIAL paper's Figure 3 (b): the mean turn weight of every action class, with its standard error.

    Each group of runs has one mean per action class, over the trajectories of all its runs together: a run with more recorded
    trajectories has more weight. Returns ``None`` if no run recorded turn weights.
    """
    series: list[Json] = []
    runs: list[RecordedRun] = []
    for index, group in enumerate(groups):
        recorded = [run for run in group.runs if run.allocation]
        if means := class_means([trajectory for run in recorded for trajectory in run.allocation]):
            series.append({"group": index, "name": group.title_of(recorded), "means": means})
            runs += recorded
    if not series:
        return None
    classes = [name for name in ACTION_CLASSES if any(name in group["means"] for group in series)]
    return {
        "name": "classes",
        "title": "Turn weight by class of action",
        "axis": "mean turn weight",
        "runs": runs,
        "classes": classes,
        "series": series,
    }


def profile_chart(groups: Sequence[RunGroup]) -> Json | None:
    """Return the chart of the TRIAL paper's Figure 3 (a), with the turn weights of one trajectory.

    :func:`readable` selects the trajectory in the first run that recorded turn weights. Returns ``None`` if no run recorded
    turn weights.
    """
    run = next((run for group in groups for run in group.runs if run.allocation), None)
    if run is None:
        return None
    shown = readable(run.allocation)
    return {
        "name": "profile",
        "title": "Turn weights of one trajectory",
        "axis": "turn weight",
        "run": run,
        "shown": shown,
        "turns": shown.turns,
    }


def readable(trajectories: Sequence[RecordedTrajectory]) -> RecordedTrajectory:
    """Return the trajectory with the most action classes, among trajectories with a length in :data:`READABLE_TURNS`.

    If no trajectory has such a length, all trajectories are considered.
    """

    def rank(trajectory: RecordedTrajectory) -> tuple[bool, int, int]:
        length = len(trajectory.turns)
        classes = {turn.action_class for turn in trajectory.turns}
        return length in READABLE_TURNS, len(classes), min(length, READABLE_TURNS[0])

    return max(trajectories, key=rank)


def all_charts(groups: Sequence[RunGroup]) -> dict[str, list[Json]]:
    """Return all charts that have data, by section of the report's page."""
    charts: dict[str, list[Json]] = {}
    for key, spec in CURVES.items():
        if chart := curve_chart(key, groups):
            charts.setdefault(spec.section, []).append(chart)
    charts["allocation"] = [chart for chart in (class_chart(groups), profile_chart(groups)) if chart]
    return charts
