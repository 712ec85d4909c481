"""Findings of runs as rows of tables: success with its interval, change since the start, paired differences."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from trial_ray.environments.adapter import EnvironmentAdapter
from trial_ray.errors import UserInputError
from trial_ray.evaluation.comparison import ComparisonError, paired_comparison, require_one_protocol, success_by_seed
from trial_ray.evaluation.results import EvaluationResult
from trial_ray.evaluation.statistics import bootstrap_mean, mean_interval
from trial_ray.metrics import TRAINING_SUCCESS
from trial_ray.reports.charts import DASH, WINDOW, curve
from trial_ray.reports.groups import RunGroup, listed
from trial_ray.reports.run import RecordedRun

MOST_GROUPS = 6
"""Groups up to which all are compared in pairs."""


@dataclass(frozen=True, slots=True)
class Change:
    """A paired difference of success, in [-1, 1].

    Attributes:
        difference: second less first.
        interval: 95 %.
        p_value: two-sided.
        seeds: pairs of runs.
        tasks: tasks that both played.
        test: how interval and p-value were found.
    """

    difference: float
    interval: tuple[float, float]
    p_value: float
    seeds: int
    tasks: int
    test: str

    @property
    def points(self) -> str:
        """Percentage points with their interval."""
        low, high = self.interval
        return f"{100 * self.difference:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"

    def __str__(self) -> str:
        return f"{self.points}, p = {self.p_value:.2g} ({self.tasks} tasks, {self.test})"


def success_rows(groups: Sequence[RunGroup]) -> list[list[str]]:
    """Held-out success of every group's trained policies, before training, and the paired change, as rows of a table."""
    return [_success_row(group, name) for group in groups for name in _played(group)]


def _played(group: RunGroup) -> list[str]:
    """Environments in which the group's trained policies were evaluated."""
    return list(dict.fromkeys(name for run in group.runs for name in run.after))


def _success_row(group: RunGroup, name: str) -> list[str]:
    played = [run for run in group.runs if name in run.after]
    results = [run.after[name] for run in played]
    pairs = [(run.before[name], run.after[name]) for run in played if name in run.before]
    row = [group.title_of(played), place(played[0], results[0])]
    try:
        iteration, longest = _iterations_of(played, name), max(run.iterations for run in played)
        row += [f"{iteration} of {longest}" if iteration < longest else str(iteration), _rate(results)]
    except ComparisonError as error:
        return [*row, DASH, str(error), DASH, DASH]
    if not pairs:
        return [*row, DASH, DASH]
    some = "" if len(pairs) == len(played) else f" ({len(pairs)} of {len(played)} runs)"
    try:
        return [*row, _rate([before for before, _ in pairs]) + some, str(compare(pairs))]
    except ComparisonError as error:
        return [*row, DASH, str(error)]


def _iterations_of(runs: Sequence[RecordedRun], name: str) -> int:
    """Iterations that the runs had trained for when they were last evaluated in an environment.

    Raises:
        ComparisonError: not all of them for as many.
    """
    found = list(dict.fromkeys(run.evaluated_after(name) for run in runs))
    if len(found) > 1:
        raise ComparisonError(
            f"The runs were evaluated after {listed(found)} iterations, so that they cannot be averaged."
        )
    return found[0]


def _rate(results: Sequence[EvaluationResult]) -> str:
    """Success over all seeds with its 95 % interval, as in a table's cell, and the tasks counted.

    Raises:
        ComparisonError: the evaluations cannot be averaged, or there is nothing to count.
    """
    values = success_by_seed(results)
    low, high = mean_interval(values, successes=True)
    failed = len(results[0].episodes) - values.shape[1]
    return f"{values.mean():.1%} [{low:.1%}, {high:.1%}] of {values.shape[1]}{f', {failed} failed' if failed else ''}"


def last_training_success(run: RecordedRun) -> float | None:
    """Mean success of the rollouts of the last :data:`WINDOW` iterations that logged it; ``None`` where none did."""
    found = list(curve(run.metrics, TRAINING_SUCCESS).values())[-WINDOW:]
    return statistics.fmean(found) if found else None


def place(run: RecordedRun, result: EvaluationResult) -> str:
    """Title of what an evaluation played: environment and split."""
    env, split = str(result.protocol.get("env", "")), str(result.protocol.get("split", ""))
    adapter = _adapter(run, result)
    if adapter is None:
        return " ".join(part for part in (env, split) if part) or "the evaluation set"
    return adapter.labels.split_titles.get(split, f"{adapter.name}, split {split}")


def _adapter(run: RecordedRun, result: EvaluationResult) -> EnvironmentAdapter | None:
    env = result.protocol.get("env")
    return next((adapter for adapter in run.config.environments.values() if adapter.env_id == env), None)


def difference_rows(groups: Sequence[RunGroup]) -> tuple[list[list[str]], list[str]]:
    """Differences between groups after training as rows of a table, and why those that are missing could not be made.

    Every pair is compared; of more than :data:`MOST_GROUPS` groups, each with the first.
    """
    rows, missing = [], []
    pairs = combinations(groups, 2) if len(groups) <= MOST_GROUPS else ((groups[0], other) for other in groups[1:])
    for first, second in pairs:
        for name in _played(first):
            one, other = _by_seed(first, name), _by_seed(second, name)
            seeds = [seed for seed in one if seed in other]
            if not other:
                continue
            if not seeds:
                missing.append(f"{first.name} and {second.name} have no seed in common, so no runs can be paired.")
                continue
            where = place(first.runs[0], one[seeds[0]].after[name])
            try:
                trained = [_iterations_of([runs[seed] for seed in seeds], name) for runs in (one, other)]
                found = compare([(one[seed].after[name], other[seed].after[name]) for seed in seeds])
            except ComparisonError as error:
                missing.append(f"{first.name} and {second.name}: {error}")
                continue
            where += f", after {trained[0]} and {trained[1]} iterations" if trained[0] != trained[1] else ""
            counted = f"{found.seeds} × {found.tasks}"
            title = f"{second.name} − {first.name}"
            rows.append([title, where, found.points, f"{found.p_value:.2g}", counted, found.test])
    return rows, missing


def compare(pairs: Sequence[tuple[EvaluationResult, EvaluationResult]]) -> Change:
    """The paired difference of one pair of evaluations (exact McNemar test) or of several (bootstrap or t-test, the stricter one).

    Raises:
        ComparisonError: tasks or protocols differ, or episodes failed in some of several pairs.
    """
    comparisons = [paired_comparison(before, after) for before, after in pairs]
    if len(pairs) == 1:
        (one,) = comparisons
        return Change(one.difference, one.interval, one.p_value, 1, one.pairs, "exact McNemar test")
    # Of all evaluations together, so that those of both sides count the same tasks.
    values = success_by_seed([pair[side] for side in (0, 1) for pair in pairs])
    before, after = values[: len(pairs)], values[len(pairs) :]
    found = bootstrap_mean(after - before)
    test, name = found.stricter
    return Change(found.mean, (test.low, test.high), test.p_value, found.seeds, found.tasks, name)


def _by_seed(group: RunGroup, name: str) -> dict[int | None, RecordedRun]:
    """The run of every seed that was evaluated; of a seed that was run twice, the first one."""
    found: dict[int | None, RecordedRun] = {}
    for run in group.runs:
        if name in run.after:
            found.setdefault(run.seed, run)
    return found


def family_rows(groups: Sequence[RunGroup]) -> list[list[str]]:
    """Success after training by family over the episodes of a group's runs, with Wilson's interval, as rows of a table.

    A group whose runs cannot be counted together has none.
    """
    return [row for group in groups for name in _played(group) for row in _families(group, name)]


def _families(group: RunGroup, name: str) -> list[list[str]]:
    played = [run for run in group.runs if name in run.after]
    results = [run.after[name] for run in played]
    try:
        _iterations_of(played, name)
        require_one_protocol(results)
    except ComparisonError:  # which the summary says
        return []
    merged = EvaluationResult(results[0].protocol, [episode for result in results for episode in result.episodes])
    title, where = group.title_of(played), place(played[0], results[0])
    adapter = _adapter(played[0], results[0])
    titles = adapter.labels.family_titles if adapter else {}
    return [
        [
            titles.get(family, family),
            title,
            where,
            f"{rate.rate:.1%} [{rate.interval[0]:.1%}, {rate.interval[1]:.1%}]",
            f"{rate.successes} of {rate.episodes}",
        ]
        for family, rate in merged.per_family().items()
    ]


def require_something(groups: Sequence[RunGroup]) -> None:
    """Refuse a report in which nothing could be shown.

    Raises:
        UserInputError: no run has an iteration or an evaluation.
    """
    runs = [run for group in groups for run in group.runs]
    if all(run.empty for run in runs):
        reasons = " ".join(dict.fromkeys(reason for run in runs for reason in run.reasons()))
        named = ", ".join(str(run.path) for run in runs[:3]) + ("…" if len(runs) > 3 else "")
        raise UserInputError(
            f"There is nothing to show in {named}: no iteration and no evaluation. {reasons} Name a run that has finished an "
            "iteration."
        )
