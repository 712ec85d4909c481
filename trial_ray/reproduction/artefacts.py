"""What finished runs become: tables as JSON, Markdown and LaTeX; figures as JSON and PNG."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trial_ray.algorithms.methods import method_title
from trial_ray.errors import UserInputError
from trial_ray.evaluation.results import EvaluationResult
from trial_ray.evaluation.table_text import to_latex, to_markdown
from trial_ray.evaluation.tables import ResultTable, TableEntry
from trial_ray.files import write_json, write_text
from trial_ray.metrics import PANEL_SUCCESS, PROFILE_STD, TRAINING_SUCCESS, TURN_SCORE
from trial_ray.reproduction.studies import PlannedRun
from trial_ray.rollout.trajectory import EpisodeResult
from trial_ray.runs.folder import RunFolder

if TYPE_CHECKING:
    from trial_ray.algorithms.methods.trial import TRIALConfig
    from trial_ray.reports.traces import Trace

REFERENCE, SUBJECT = "grpo", "trial"
FAMILY = "pick_two_obj_and_place"
"""The paper's allocation trace shows this family."""


def assemble(
    name: str, runs: Sequence[PlannedRun], folder: Path, tried: Sequence[Mapping[str, Any]] = ()
) -> list[Path]:
    """Make a table or figure of the runs that are done; returns the files written.

    Args:
        name: of the study.
        runs: of which those that are done take part.
        folder: where the files go.
        tried: what the choice of a setting tried, for the record (``plan.choose``).

    Raises:
        UserInputError: none is done, or what they hold cannot be put together.
    """
    done = [run for run in runs if run.state() == "done"]
    if not done:
        raise UserInputError(f"None of the {len(runs)} runs of {name} is done, so there is nothing to assemble.")
    if name == "study":
        return [*_table(name, done, folder), *_learning(done, folder, tried)]
    makers = {"figure2": _figure2, "figure3": _figure3}
    return makers[name](done, folder) if name in makers else _table(name, done, folder)


def _table(name: str, runs: Sequence[PlannedRun], folder: Path) -> list[Path]:
    entries = [
        TableEntry(run.backbone, run.method, run.seed, EvaluationResult.load(run.evaluation(evaluated)))
        for run in _rows(runs)
        for evaluated in run.sets
    ]
    reference = REFERENCE if any(run.method == REFERENCE for run in runs) else runs[0].method
    table = ResultTable(entries, reference, SUBJECT)
    return [
        write_json(folder / f"{name}.json", {**table.to_dict(), "runs": [run.name for run in runs]}),
        write_text(folder / f"{name}.md", to_markdown(table, method_title)),
        write_text(folder / f"{name}.tex", to_latex(table, method_title)),
    ]


def _learning(runs: Sequence[PlannedRun], folder: Path, tried: Sequence[Mapping[str, Any]]) -> list[Path]:
    from trial_ray.reports.dynamics import curve, learning, read_metrics, to_markdown
    from trial_ray.reports.plots import plot_learning

    written, parts = [], []
    for environment in dict.fromkeys(run.environment for run in runs):
        curves: dict[str, dict[int, dict[int, float]]] = {}
        for run in (run for run in runs if run.environment == environment):
            found = curve(read_metrics(RunFolder(run.folder).metrics), TRAINING_SUCCESS)
            curves.setdefault(run.method, {})[run.seed] = dict(found)
        if REFERENCE not in curves:
            continue
        data = learning(curves, REFERENCE, SUBJECT)
        parts.append(f"**{environment}**\n\n{to_markdown(data, method_title)}")
        title = f"{environment}: success of training rollouts on new games, moving mean of 5 iterations"
        shown = {**data, "methods": {method_title(name): of for name, of in data["methods"].items()}, "title": title}
        written.append(write_json(folder / f"study_learning_{environment}.json", {**data, "tried": list(tried)}))
        written += plot_learning(shown, folder / f"study_learning_{environment}.png")
    return [*written, write_text(folder / "study_learning.md", "\n".join(parts))]


def _rows(runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Backbones together, in the order in which they were planned."""
    backbones = list(dict.fromkeys(run.backbone for run in runs))
    return sorted(runs, key=lambda run: backbones.index(run.backbone))


def _figure2(runs: Sequence[PlannedRun], folder: Path) -> list[Path]:
    from trial_ray.reports.dynamics import mean_over_runs, panel_curve, read_metrics, windows
    from trial_ray.reports.plots import plot_dynamics

    metrics: dict[str, list[list[dict[str, float]]]] = {}
    for run in runs:
        metrics.setdefault(method_title(run.method), []).append(read_metrics(RunFolder(run.folder).metrics))
    data: dict[str, Any] = {
        "title": f"{runs[0].backbone}, {runs[0].environment}: {_seeds(runs)}",
        "iterations": runs[0].iterations,
        "hindsight_start_iteration": _hindsight_start(runs),
        "panel": {method: panel_curve(found, PANEL_SUCCESS) for method, found in metrics.items()},
        "runs": [run.name for run in runs],
    }
    for name, key in (("turn_score", TURN_SCORE), ("profile_std", PROFILE_STD)):
        means = {method: mean_over_runs([windows(run, key) for run in found]) for method, found in metrics.items()}
        data[name] = {method: found for method, found in means.items() if found}
    return [write_json(folder / "figure2.json", data), *plot_dynamics(data, folder / "figure2.png")]


def _hindsight_start(runs: Sequence[PlannedRun]) -> int:
    return next((_trial_config(run).hindsight_start_iteration for run in runs if run.method == "trial"), 1)


def _trial_config(run: PlannedRun) -> TRIALConfig:
    from trial_ray.algorithms.methods.trial import TRIALConfig

    assert isinstance(run.config, TRIALConfig)
    return run.config


def _seeds(runs: Sequence[PlannedRun]) -> str:
    count = len({run.seed for run in runs})
    return f"{count} seed{'s' if count > 1 else ''}"


def _figure3(runs: Sequence[PlannedRun], folder: Path) -> list[Path]:
    from trial_ray.environments.adapter import ACTION_CLASSES
    from trial_ray.reports.plots import plot_allocation
    from trial_ray.reports.traces import class_means, readable_trace

    trained = [run for run in runs if run.method == "trial"]
    if not trained:
        raise UserInputError("The allocation trace needs a finished run of TRIAL; found none.")
    traces, family = _allocation_traces(trained[0])
    data: dict[str, Any] = {
        "title": f"{trained[0].name}: {len(traces)} successful trajectories of one iteration"
        + (f", family {family}" if family else ", all families"),
        "family": family,
        "class_order": list(ACTION_CLASSES),
        "classes": class_means(traces),
        "example": readable_trace(traces).to_dict(),
        "trajectories": [trace.to_dict() for trace in traces],
        "paired": _paired_traces(runs, family),
    }
    written = [write_json(folder / "figure3.json", data), *plot_allocation(data, folder / "figure3.png")]
    return [*written, write_text(folder / "figure3_paired.md", paired_markdown(data["paired"]))]


def _allocation_traces(run: PlannedRun) -> tuple[list[Trace], str | None]:
    """The last recorded training batch, scored by the run's final policy."""
    from trial_ray.models.module import load_causal_lm, load_tokenizer
    from trial_ray.reports.allocation import trace_trajectories
    from trial_ray.reports.traces import choose_trajectories
    from trial_ray.rollout.recording import read_trajectories
    from trial_ray.runs.checkpoints import find_model

    recorded = RunFolder(run.folder)
    trajectories = read_trajectories(recorded.trajectories, recorded.recorded_iterations()[-1])
    chosen, family = choose_trajectories(trajectories, FAMILY)
    model = str(find_model(run.folder))
    config = _trial_config(run)
    lm = load_causal_lm(model, config.model_dtype)
    return trace_trajectories(lm, load_tokenizer(model), chosen, config, config.gap_clip), family


def _paired_traces(runs: Sequence[PlannedRun], family: str | None) -> dict[str, Any] | None:
    """The first seed of every method, greedily on the first game of the evaluation set that only TRIAL's run solved."""
    from trial_ray.reports.allocation import trace_pair
    from trial_ray.runs.checkpoints import find_model

    seed = min(run.seed for run in runs)
    pair = {run.method: run for run in runs if run.seed == seed}
    if pair.keys() != {"grpo", "trial"}:
        return None
    config, evaluated = _trial_config(pair["trial"]), pair["trial"].sets[0]
    results = {method: EvaluationResult.load(run.evaluation(evaluated)) for method, run in pair.items()}
    task_id = telling_task(results["grpo"], results["trial"], family)
    models = {method_title(method): find_model(run.folder) for method, run in pair.items()}
    traces = trace_pair(models, task_id, pair["trial"].entry(evaluated), config, config.gap_clip)
    return {"task_id": task_id, "seed": seed, "traces": {name: trace.to_dict() for name, trace in traces.items()}}


def telling_task(reference: EvaluationResult, other: EvaluationResult, family: str | None) -> str:
    """The first task of the family that ``other`` alone solved; else the first that both solved; else the first."""
    pairs = [
        (before, after)
        for before, after in zip(reference.episodes, other.episodes, strict=True)
        if family in (None, after.family)
    ] or list(zip(reference.episodes, other.episodes, strict=True))

    def rank(pair: tuple[EpisodeResult, EpisodeResult]) -> int:
        before, after = pair
        return (after.success and not before.success) * 2 + (after.success and before.success)

    return max(pairs, key=rank)[1].task_id


def paired_markdown(paired: dict[str, Any] | None) -> str:
    """The traces side by side, one row a turn."""
    if paired is None:
        return "Two policies on one game: needs finished runs of both GRPO and TRIAL with the same seed.\n"
    traces = paired["traces"]
    lines = [f"Game `{paired['task_id']}`, most probable responses, seed {paired['seed']}.", ""]
    lines += [
        f"| Turn |{'|'.join(f' {name}: action | s | w ' for name in traces)}|",
        f"| ---: |{' --- | ---: | ---: |' * len(traces)}",
    ]
    for turn in range(max(len(trace["turns"]) for trace in traces.values())):
        cells = [_turn_cells(trace["turns"], turn) for trace in traces.values()]
        lines.append(f"| {turn + 1} | {' | '.join(cells)} |")
    ends = [
        f"{name} {'succeeds' if trace['success'] else 'fails'} after {len(trace['turns'])} turns"
        for name, trace in traces.items()
    ]
    return "\n".join([*lines, "", "; ".join(ends) + "."]) + "\n"


def _turn_cells(turns: Sequence[dict[str, Any]], index: int) -> str:
    if index >= len(turns):
        return " |  | "
    turn = turns[index]
    shown = "".join(char if char.isprintable() else " " for char in turn["action"])
    return f"{_escaped(shown)} → {_first_sentence(turn['outcome'])} | {turn['score']:.3f} | {turn['weight']:.2f}"


def _first_sentence(text: str) -> str:
    return _escaped(" ".join(text.split()).partition(". ")[0][:80])


def _escaped(text: str) -> str:
    """Text that Markdown shows as it is."""
    return re.sub(r"([\\`*_\[\]<>|])", r"\\\1", text)
