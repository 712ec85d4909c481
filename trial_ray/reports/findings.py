"""What runs found, in sentences and rows: success with its interval, change since the start, paired differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from trial_ray.errors import UserInputError
from trial_ray.evaluation.comparison import ComparisonError, paired_comparison
from trial_ray.evaluation.intervals import bootstrap_curve, bootstrap_mean, paired_bootstrap
from trial_ray.evaluation.results import EvaluationResult
from trial_ray.reports.dynamics import WINDOW
from trial_ray.reports.run_groups import RunGroup
from trial_ray.reports.run_record import RunRecord

TRAINING_SUCCESS = "env_runners/success_rate"
MOST_GROUPS = 6
"""Groups that are all named in the summary, and compared in pairs."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A paired difference of success, in [-1, 1].

    Attributes:
        first: what is subtracted.
        second: from what.
        where: environment and split.
        difference: ``second - first``.
        interval: 95 %.
        p_value: two-sided.
        seeds: pairs of runs.
        tasks: tasks that both played.
        test: how interval and p-value were found.
    """

    first: str
    second: str
    where: str
    difference: float
    interval: tuple[float, float]
    p_value: float
    seeds: int
    tasks: int
    test: str

    def __str__(self) -> str:
        low, high = self.interval
        return (
            f"{100 * self.difference:+.1f} points [{100 * low:+.1f}, {100 * high:+.1f}] on the same {self.tasks} tasks "
            f"({self.test}, p = {self.p_value:.2g})"
        )


def summary_sentences(groups: Sequence[RunGroup], differences: Sequence[Difference]) -> list[str]:
    """Success of every group's trained policy and its paired change since the start, then the differences of the groups.

    Of more than :data:`MOST_GROUPS` groups, the best ones are named.
    """
    named = groups if len(groups) <= MOST_GROUPS else sorted(groups, key=_success_of, reverse=True)[:MOST_GROUPS]
    sentences = [sentence for group in named for sentence in _group_sentences(group)]
    if len(groups) > len(named):
        return [f"The {len(named)} best of {len(groups)} groups of runs:", *sentences]
    return [*sentences, *(f"After training, {one.second} differs from {one.first} by {one}." for one in differences)]


def _success_of(group: RunGroup) -> float:
    """What groups are ranked by: success after training, else in the last iterations; -1 where neither is known."""
    rates = [result.success_rate for run in group.runs for result in run.after.values() if result.counted]
    rates = rates or [rate for run in group.runs if (rate := last_training_success(run)) is not None]
    return float(np.mean(rates)) if rates else -1.0


def _group_sentences(group: RunGroup) -> list[str]:
    names = list(dict.fromkeys(name for run in group.runs for name in run.after))
    if not names:
        return [_training_sentence(group)]
    return [_panel_sentence(group, name) for name in names]


def _panel_sentence(group: RunGroup, name: str) -> str:
    played = [run for run in group.runs if name in run.after]
    results = [run.after[name] for run in played]
    where = place(played[0], results[0])
    iterations = max(run.iterations for run in group.runs)
    trained = f" after {iterations} iteration{'s' if iterations != 1 else ''}" if iterations else ""
    sentence = f"{group.title} solves {_rate(results)} of {len(results[0].episodes)} held-out tasks ({where}){trained}"
    pairs = [(run.before[name], run.after[name]) for run in played if name in run.before]
    if not pairs:
        return f"{sentence}. It was not evaluated before training."
    try:
        change = compare("before", "after", where, pairs)
    except ComparisonError as error:
        return f"{sentence}. Before and after cannot be compared: {error}"
    return f"{sentence}, {_rate([before for before, _ in pairs])} before training. Change: {change}."


def _rate(results: Sequence[EvaluationResult]) -> str:
    """Success over seeds and tasks with its 95 % interval: Wilson's for one evaluation, else the two-level bootstrap's."""
    if len(results) == 1:
        result = results[0]
        if not result.counted:
            return "None (no episode ended)"
        low, high = result.interval
        return f"{result.success_rate:.1%} [{low:.1%}, {high:.1%}]"
    values = _success(results)
    if values is None:
        return f"{np.mean([result.success_rate for result in results]):.1%}"
    found = bootstrap_mean(values)
    return f"{found.mean:.1%} [{found.low:.1%}, {found.high:.1%}]"


def _training_sentence(group: RunGroup) -> str:
    rates = [rate for run in group.runs if (rate := last_training_success(run)) is not None]
    if not rates:
        return f"{group.title}: neither an evaluation nor success in training was recorded."
    said = f"{group.title}: no held-out tasks were played after training. Success in its last {WINDOW} iterations:"
    if len(rates) > 1:
        ((low, high),) = bootstrap_curve(np.array(rates)[:, None])
        return f"{said} {np.mean(rates):.1%} [{low:.1%}, {high:.1%}] (bootstrap over {len(rates)} runs)."
    return f"{said} {rates[0]:.1%}; a single run gives no interval."


def last_training_success(run: RunRecord) -> float | None:
    """Mean success of the rollouts of the last iterations; ``None`` where it was not logged."""
    values = [line[TRAINING_SUCCESS] for line in run.metrics if TRAINING_SUCCESS in line][-WINDOW:]
    return float(np.mean(values)) if values else None


def place(run: RunRecord, result: EvaluationResult) -> str:
    """Title of what an evaluation played: environment and split."""
    env, split = str(result.protocol.get("env", "")), str(result.protocol.get("split", ""))
    known = next((found for found in run.environments if found.adapter.env_id == env), None)
    if known is None:
        return " ".join(part for part in (env, split) if part) or "the panel"
    return known.adapter.split_titles.get(split, f"{known.title}, split {split}")


def paired_differences(groups: Sequence[RunGroup]) -> tuple[list[Difference], list[str]]:
    """Differences between groups after training, and why those that are missing could not be made.

    Every pair is compared; of more than :data:`MOST_GROUPS` groups, each with the first.
    """
    found, missing = [], []
    pairs = combinations(groups, 2) if len(groups) <= MOST_GROUPS else ((groups[0], other) for other in groups[1:])
    for first, second in pairs:
        for name in dict.fromkeys(name for run in first.runs for name in run.after):
            one, other = _by_seed(first, name), _by_seed(second, name)
            seeds = [seed for seed in one if seed in other]
            if not other:
                continue
            if not seeds:
                missing.append(f"{first.name} and {second.name} have no seed in common, so no runs can be paired.")
                continue
            where = place(first.runs[0], one[seeds[0]])
            try:
                found.append(compare(first.name, second.name, where, [(one[seed], other[seed]) for seed in seeds]))
            except ComparisonError as error:
                missing.append(f"{first.name} and {second.name}: {error}")
    return found, missing


def compare(
    first: str, second: str, where: str, pairs: Sequence[tuple[EvaluationResult, EvaluationResult]]
) -> Difference:
    """The paired difference of one pair of evaluations (exact McNemar test) or of several (bootstrap over seeds and tasks).

    Raises:
        ComparisonError: tasks or protocols differ, or episodes failed in some of several pairs.
    """
    comparisons = [paired_comparison(before, after) for before, after in pairs]
    if len(pairs) == 1:
        (one,) = comparisons
        return Difference(
            first, second, where, one.difference, one.interval, one.p_value, 1, one.pairs, "exact McNemar test"
        )
    before, after = (_success([pair[side] for pair in pairs]) for side in (0, 1))
    if before is None or after is None:
        raise ComparisonError(
            "the seeds did not all finish the same tasks, so that no bootstrap over seeds and tasks is possible."
        )
    found = paired_bootstrap(before, after)
    test = f"bootstrap over {found.seeds} seeds and the tasks"
    interval = (found.low, found.high)
    return Difference(first, second, where, found.mean, interval, found.p_value, found.seeds, found.tasks, test)


def _success(results: Sequence[EvaluationResult]) -> np.ndarray | None:
    """Success, float ``[evaluations, tasks]``; ``None`` where they have not all finished the same tasks."""
    rows = [{episode.task_id: float(episode.success) for episode in result.counted} for result in results]
    tasks = list(rows[0])
    if not tasks or any(row.keys() != rows[0].keys() for row in rows):
        return None
    return np.array([[row[task] for task in tasks] for row in rows])


def _by_seed(group: RunGroup, name: str) -> dict[int | None, EvaluationResult]:
    """The evaluation of every seed; of a seed that was run twice, the first one's."""
    found: dict[int | None, EvaluationResult] = {}
    for run in group.runs:
        if name in run.after:
            found.setdefault(run.seed, run.after[name])
    return found


@dataclass(frozen=True, slots=True)
class FamilyRow:
    """Success by family of one group, over its runs' episodes, with Wilson's interval."""

    group: str
    where: str
    family: str
    successes: int
    episodes: int
    rate: float
    interval: tuple[float, float]


def family_rows(groups: Sequence[RunGroup]) -> list[FamilyRow]:
    """Success after training by family."""
    rows = []
    for group in groups:
        for name in dict.fromkeys(name for run in group.runs for name in run.after):
            rows += _families(group, name)
    return rows


def _families(group: RunGroup, name: str) -> list[FamilyRow]:
    results = [run.after[name] for run in group.runs if name in run.after]
    merged = EvaluationResult(results[0].protocol, [episode for result in results for episode in result.episodes])
    where = place(group.runs[0], results[0])
    titles = _family_titles(group.runs[0], results[0])
    return [
        FamilyRow(
            group.title, where, titles.get(family, family), rate.successes, rate.episodes, rate.rate, rate.interval
        )
        for family, rate in merged.per_family().items()
    ]


def _family_titles(run: RunRecord, result: EvaluationResult) -> Mapping[str, str]:
    env = result.protocol.get("env")
    return next((known.adapter.family_titles for known in run.environments if known.adapter.env_id == env), {})


def require_something(groups: Sequence[RunGroup]) -> None:
    """Refuse a report in which nothing could be shown.

    Raises:
        UserInputError: no run has an iteration or an evaluation.
    """
    runs = [run for group in groups for run in group.runs]
    if all(run.empty for run in runs):
        reasons = " ".join(dict.fromkeys(reason for run in runs for reason in run.missing))
        named = ", ".join(str(run.path) for run in runs[:3]) + ("…" if len(runs) > 3 else "")
        raise UserInputError(
            f"There is nothing to show in {named}: no iteration and no evaluation. {reasons} Name a run that has finished an "
            "iteration."
        )
