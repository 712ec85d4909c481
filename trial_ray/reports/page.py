"""Report of one or several runs as one HTML page."""

from __future__ import annotations

import base64
import hashlib
import statistics
from collections.abc import Iterator, Sequence
from itertools import chain, combinations
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trial_envs.core.extras import install_command
from trial_ray import __version__
from trial_ray.adapters.adapter import EnvironmentAdapter
from trial_ray.adapters.registry import find_adapter
from trial_ray.errors import MissingDependencyError, UserInputError, first_line
from trial_ray.evaluation.comparison import ComparisonError, paired_comparison, require_one_protocol, success_by_seed
from trial_ray.evaluation.results import EvaluationResult, protocol_card
from trial_ray.evaluation.statistics import bootstrap_mean, mean_interval
from trial_ray.files import write_text
from trial_ray.metrics import TRAINING_SUCCESS
from trial_ray.reports import ASSETS, render
from trial_ray.reports.charts import DASH, WINDOW, all_charts, curve
from trial_ray.reports.groups import (
    RunGroup,
    differing_settings,
    group_runs,
    listed,
    recorded_iterations,
    run_label,
    value_text,
)
from trial_ray.reports.plots import chart_svg
from trial_ray.runs.reader import RecordedRun, read_runs
from trial_ray.runs.terminal import show

MAX_GROUPS = 6
"""Maximum number of groups of runs of which all pairs are compared; of more groups, each is compared with the first."""


class Change(NamedTuple):
    """Mean difference of success rates over pairs of evaluations, as shown in a table of the page.

    Attributes:
        points: success of each pair's second evaluation minus the first, in percentage points, with its 95 % interval.
        p_value: two-sided p-value.
        seeds: number of pairs of evaluations.
        tasks: number of tasks that were finished in all evaluations.
        test: name of the method for the interval and the p-value.
    """

    points: str
    p_value: float
    seeds: int
    tasks: int
    test: str


def _evaluated_runs(group: RunGroup) -> Iterator[tuple[str, list[RecordedRun]]]:
    """Yield the environments in which trained policies of a group of runs were evaluated, each with the runs evaluated in it."""
    for name in dict.fromkeys(name for run in group.runs for name in run.after):
        yield name, [run for run in group.runs if name in run.after]


def success_rows(groups: Sequence[RunGroup]) -> list[list[str]]:
    """Return table rows with the held-out success of every group of runs after and before training, and the paired change."""
    return [_success_row(group, name, runs) for group in groups for name, runs in _evaluated_runs(group)]


def _success_row(group: RunGroup, name: str, runs: Sequence[RecordedRun]) -> list[str]:
    results = [run.after[name] for run in runs]
    pairs = [(run.before[name], run.after[name]) for run in runs if name in run.before]
    row = [group.title_of(runs), place(runs[0], results[0])]
    try:
        iteration, last = _iterations_of(runs, name), max(run.iterations for run in runs)
        row += [f"{iteration} of {last}" if iteration < last else str(iteration), _rate(results)]
    except ComparisonError as error:
        return [*row, DASH, str(error), DASH, DASH]
    if not pairs:
        return [*row, DASH, DASH]
    partial = "" if len(pairs) == len(runs) else f" ({len(pairs)} of {len(runs)} runs)"
    try:
        before, change = _rate([before for before, _ in pairs]), compare(pairs)
        tested = f"p = {change.p_value:.2g} ({change.tasks} tasks, {change.test})"
        return [*row, before + partial, f"{change.points}, {tested}"]
    except ComparisonError as error:
        return [*row, DASH, str(error)]


def protocol_rows(groups: Sequence[RunGroup]) -> list[list[str]]:
    """Return table rows with the entries of the evaluation protocols, by environment and split.

    If the runs differ in an entry, each of its values has a row, with the names of the runs that have this value.
    """
    cards: dict[str, list[tuple[str, dict[str, str]]]] = {}
    for run in (run for group in groups for run in group.runs):
        for result in run.after.values():
            cards.setdefault(place(run, result), []).append((run.name, protocol_card(result)))
    rows = []
    for where, named in cards.items():
        for title in dict.fromkeys(title for _, card in named for title in card if title != "policy"):
            runs: dict[str, list[str]] = {}
            for name, card in named:
                runs.setdefault(card.get(title, DASH), []).append(name)
            rows += [
                [title, where, f"{text} ({', '.join(names)})" if len(runs) > 1 else text]
                for text, names in runs.items()
            ]
    return rows


def _iterations_of(runs: Sequence[RecordedRun], name: str) -> int:
    """Return the number of iterations that the runs had trained for when they were last evaluated in an environment.

    Raises:
        ComparisonError: the runs had trained for different numbers of iterations.
    """
    iterations = list(dict.fromkeys(run.evaluated_after(name) for run in runs))
    if len(iterations) > 1:
        raise ComparisonError(
            f"The runs were evaluated after {listed(iterations)} iterations, so they cannot be averaged."
        )
    return iterations[0]


def _rate(results: Sequence[EvaluationResult]) -> str:
    """Return a text with the mean success rate over evaluations, its 95 % interval, and the number of tasks.

    Raises:
        ComparisonError: the evaluations cannot be averaged, or no episode can be counted.
    """
    values = success_by_seed(results)
    low, high = mean_interval(values, successes=True)
    failed = len(results[0].episodes) - values.shape[1]
    return f"{values.mean():.1%} [{low:.1%}, {high:.1%}] of {values.shape[1]}{f', {failed} failed' if failed else ''}"


def last_training_success(run: RecordedRun) -> float | None:
    """Return the mean training success over the last :data:`WINDOW` iterations that logged it; ``None`` if none logged it."""
    rates = list(curve(run.metrics, TRAINING_SUCCESS).values())[-WINDOW:]
    return statistics.fmean(rates) if rates else None


def place(run: RecordedRun, result: EvaluationResult) -> str:
    """Return the title of the environment and split of an evaluation."""
    adapter, split = _adapter(run, result), str(result.protocol.get("split", ""))
    return adapter.labels.split_titles.get(split, f"{adapter.name}, split {split}")


def _adapter(run: RecordedRun, result: EvaluationResult) -> EnvironmentAdapter:
    return find_adapter(str(result.protocol.get("env", "")), list(run.config.environments.values()))


def difference_rows(groups: Sequence[RunGroup]) -> tuple[list[list[str]], list[str]]:
    """Return table rows with the differences in success between groups of runs after training, and the reasons for missing rows.

    All pairs of groups are compared or, if there are more than :data:`MAX_GROUPS` groups, each group with the first. If a group
    has several runs with the same seed, the first of them is used.
    """
    rows, missing = [], []
    pairs = combinations(groups, 2) if len(groups) <= MAX_GROUPS else ((groups[0], other) for other in groups[1:])
    for first, second in pairs:
        others = dict(_evaluated_runs(second))
        for name, runs in _evaluated_runs(first):
            if name not in others:
                continue
            left, right = ({run.seed: run for run in reversed(members)} for members in (runs, others[name]))
            if not (seeds := [run.seed for run in runs if left[run.seed] is run and run.seed in right]):
                missing.append(f"{first.name} and {second.name} have no seed in common, so no runs can be paired.")
                continue
            where = place(runs[0], runs[0].after[name])
            try:
                trained = [_iterations_of([side[seed] for seed in seeds], name) for side in (left, right)]
                change = compare([(left[seed].after[name], right[seed].after[name]) for seed in seeds])
            except ComparisonError as error:
                missing.append(f"{first.name} and {second.name}: {error}")
                continue
            where += f", after {trained[0]} and {trained[1]} iterations" if trained[0] != trained[1] else ""
            counted = f"{change.seeds} × {change.tasks}"
            title = f"{second.name} − {first.name}"
            rows.append([title, where, change.points, f"{change.p_value:.2g}", counted, change.test])
    return rows, missing


def compare(pairs: Sequence[tuple[EvaluationResult, EvaluationResult]]) -> Change:
    """Return the paired difference of success rates over one or several pairs of evaluations.

    One pair is compared by :func:`paired_comparison`. For several pairs, the bootstrap over seeds and tasks or the t-test over
    seeds is used, whichever has the larger p-value.

    Raises:
        ComparisonError: tasks or evaluation protocols differ or, with several pairs, the evaluations did not finish the same tasks.
    """
    if len(pairs) == 1:
        paired = paired_comparison(*pairs[0])
        return Change(_points(paired.difference, *paired.interval), paired.p_value, 1, paired.pairs, paired.test)
    # One call of success_by_seed() for all evaluations checks that `before` and `after` have the same finished tasks.
    before, after = np.split(success_by_seed([*(before for before, _ in pairs), *(after for _, after in pairs)]), 2)
    bootstrap = bootstrap_mean(after - before)
    test, name = bootstrap.stricter
    return Change(_points(bootstrap.mean, test.low, test.high), test.p_value, bootstrap.seeds, bootstrap.tasks, name)


def _points(difference: float, low: float, high: float) -> str:
    return f"{100 * difference:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"


def family_rows(groups: Sequence[RunGroup]) -> list[list[str]]:
    """Return table rows with the success after training and its interval, by group of runs and task family.

    A group's success is over the episodes of all of its runs. A group has no rows if its runs differ in the evaluation protocol or
    the number of iterations; :func:`success_rows` gives the reason.
    """
    rows = []
    for group, name, runs in ((member, *evaluated) for member in groups for evaluated in _evaluated_runs(member)):
        results = [run.after[name] for run in runs]
        try:
            _iterations_of(runs, name)
            require_one_protocol(results)
        except ComparisonError:
            continue
        merged = EvaluationResult(results[0].protocol, [episode for result in results for episode in result.episodes])
        titles, where = _adapter(runs[0], merged).labels.family_titles, place(runs[0], merged)
        for family, rate in merged.per_family().items():
            success = f"{rate.rate:.1%} [{rate.interval[0]:.1%}, {rate.interval[1]:.1%}]"
            counted = f"{rate.successes} of {rate.episodes}"
            rows.append([titles.get(family, family), group.title_of(runs), where, success, counted])
    return rows


def report_page(groups: Sequence[RunGroup], title: str) -> str:
    """Return the HTML page about groups of runs. Recorded text is escaped, and the page runs no script.

    Args:
        groups: groups of runs to show.
        title: title of the page.
    """
    from markupsafe import Markup

    runs = [run for group in groups for run in group.runs]
    missing = [reason if len(runs) == 1 else f"{run.name}: {reason}" for run in runs for reason in run.reasons()]
    charts = all_charts(groups)
    for chart in chain(*charts.values()):
        try:
            chart["image"] = base64.b64encode(chart_svg(chart).encode()).decode()
        except MissingDependencyError:
            command = install_command("reports")
            missing.append(f"Charts need matplotlib (`{command}`); the numbers of each chart are in its table.")
            break
        except UserInputError as error:
            missing.append(f"The chart “{chart['title']}”: {error}")
    style = (ASSETS / "report.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return render(
        "report.html.jinja",
        policy=f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'",
        style=Markup(style),
        title=title,
        version=__version__,
        missing=missing,
        groups=groups,
        runs=runs,
        charts=charts,
        success=success_rows(groups),
        protocols=protocol_rows(groups),
        families=family_rows(groups),
        differences=difference_rows(groups),
        last_training_success=last_training_success,
        recorded_iterations=recorded_iterations,
        run_label=run_label,
        differing_settings=differing_settings,
        value_text=value_text,
    )


REPORT_FILE = "report.html"


def load_groups(folders: Sequence[Path]) -> list[RunGroup]:
    """Read the runs in several folders, and group runs that differ only in their seed.

    Raises:
        UserInputError: a folder is not the folder of a run or of a sweep, or no run has an iteration or an evaluation.
    """
    unique = dict.fromkeys(folder.expanduser().resolve() for folder in folders)
    groups = group_runs([run for folder in unique for run in read_runs(folder)])
    runs = [run for group in groups for run in group.runs]
    if not any(run.metrics or run.evaluations for run in runs):
        reasons = " ".join(dict.fromkeys(reason for run in runs for reason in run.reasons()))
        named = ", ".join(str(run.path) for run in runs[:3]) + ("…" if len(runs) > 3 else "")
        raise UserInputError(
            f"There is nothing to show in {named}: no iteration and no evaluation. {reasons} Name a run that has finished an "
            "iteration."
        )
    return groups


def leave_report(folder: Path) -> None:
    """Write the report of a finished run or sweep into its folder, and print its path.

    An error is printed as one line and not raised: a failed report must not end the command of a run that succeeded.
    """
    try:
        path = write_text(folder / REPORT_FILE, report_page(load_groups([folder]), folder.name))
    except Exception as error:
        show(f"no report was written: {first_line(error)}")
        return
    show(f"report: {path}")
