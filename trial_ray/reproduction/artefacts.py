"""Artefacts of finished runs: tables as JSON, Markdown and LaTeX; figures as JSON and PNG."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trial_ray.algorithms.methods import method_title
from trial_ray.errors import UserInputError
from trial_ray.evaluation.results import EvaluationResult
from trial_ray.evaluation.table_text import to_latex, to_markdown
from trial_ray.evaluation.tables import ResultTable, TableEntry
from trial_ray.files import write_json, write_text
from trial_ray.metrics import CURVES, TRAINING_SUCCESS
from trial_ray.reproduction.studies import PlannedRun
from trial_ray.rollout.trajectory import EpisodeResult
from trial_ray.runs.folder import RunFolder
from trial_ray.runs.report import load_groups

if TYPE_CHECKING:
    from trial_ray.algorithms.methods.trial import TRIALConfig
    from trial_ray.reports.records import Allocation

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
    from trial_ray.reports.charts import curve_chart
    from trial_ray.reports.dynamics import curve, learning, to_markdown
    from trial_ray.reports.plots import write_figure

    written, parts = [], []
    in_windows = replace(CURVES[TRAINING_SUCCESS], windowed=True)
    for environment in dict.fromkeys(run.environment for run in runs):
        groups = load_groups([run.folder for run in runs if run.environment == environment])
        methods = {run.folder.resolve(): run.method for run in runs}
        found = {methods[group.runs[0].path]: group for group in groups}
        if REFERENCE not in found:
            continue
        curves = {
            method: {run.seed or 0: dict(curve(run.metrics, TRAINING_SUCCESS)) for run in group.runs}
            for method, group in found.items()
        }
        data = learning(curves, REFERENCE, SUBJECT)
        parts.append(f"**{environment}**\n\n{to_markdown(data, method_title)}")
        name = f"study_learning_{environment}"
        written.append(write_json(folder / f"{name}.json", {**data, "tried": list(tried)}))
        pairs = [[found[REFERENCE], group] for group in groups if group is not found[REFERENCE]]
        charts = [chart for pair in pairs or [groups] if (chart := curve_chart(TRAINING_SUCCESS, pair, in_windows))]
        written += write_figure(folder, name, charts, f"{environment}: success of training rollouts on new games")
    return [*written, write_text(folder / "study_learning.md", "\n".join(parts))]


def _rows(runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Backbones together, in the order in which they were planned."""
    backbones = list(dict.fromkeys(run.backbone for run in runs))
    return sorted(runs, key=lambda run: backbones.index(run.backbone))


def _figure2(runs: Sequence[PlannedRun], folder: Path) -> list[Path]:
    from trial_ray.reports.plots import figure2, write_figure

    groups = load_groups([run.folder for run in runs])
    charts = figure2(groups)
    data = {"runs": [run.name for run in runs], **{chart["name"]: chart["series"] for chart in charts}}
    title = f"{runs[0].backbone}, {runs[0].environment}: {'; '.join(group.title for group in groups)}"
    return [write_json(folder / "figure2.json", data), *write_figure(folder, "figure2", charts, title)]


def _trial_config(run: PlannedRun) -> TRIALConfig:
    from trial_ray.algorithms.methods.trial import TRIALConfig

    assert isinstance(run.config, TRIALConfig)
    return run.config


def _figure3(runs: Sequence[PlannedRun], folder: Path) -> list[Path]:
    from trial_ray.reports.plots import figure3, write_figure
    from trial_ray.reports.records import RunGroup, RunRecord
    from trial_ray.reports.traces import class_means

    trained = [run for run in runs if run.method == "trial"]
    if not trained:
        raise UserInputError("The allocation trace needs a finished run of TRIAL; found none.")
    allocation, family = _allocation(trained[0])
    title = (
        f"{trained[0].name}: {len(allocation.traces)} successful trajectories of one iteration, "
        f"{f'family {family}' if family else 'all families'}"
    )
    data: dict[str, Any] = {
        "title": title,
        "family": family,
        "classes": class_means(allocation.traces),
        "trajectories": [trace.to_dict() for trace in allocation.traces],
        "paired": _paired_traces(runs, family),
    }
    group = RunGroup(trained[0].name, [RunRecord(trained[0].folder, allocation=allocation)])
    return [
        write_json(folder / "figure3.json", data),
        *write_figure(folder, "figure3", figure3(group), title),
        write_text(folder / "figure3_paired.md", paired_markdown(data["paired"])),
    ]


def _allocation(run: PlannedRun) -> tuple[Allocation, str | None]:
    """The last recorded training batch, scored by the run's final policy; successful trajectories of one family, if any."""
    from trial_ray.models.loading import load_causal_lm, load_tokenizer
    from trial_ray.reports.records import Allocation
    from trial_ray.reports.traces import choose_trajectories
    from trial_ray.reproduction.allocation import trace_trajectories
    from trial_ray.rollout.recording import read_trajectories
    from trial_ray.runs.checkpoints import find_model

    recorded = RunFolder(run.folder)
    iteration = recorded.recorded_iterations()[-1]
    chosen, family = choose_trajectories(read_trajectories(recorded.trajectories, iteration), FAMILY)
    model = str(find_model(run.folder))
    config = _trial_config(run)
    lm = load_causal_lm(model, config.model_dtype)
    return Allocation(iteration, trace_trajectories(lm, load_tokenizer(model), chosen, config)), family


def _paired_traces(runs: Sequence[PlannedRun], family: str | None) -> dict[str, Any] | None:
    """The first seed of every method, greedily on the first game of the evaluation set that only TRIAL's run solved."""
    from trial_ray.reproduction.allocation import trace_game
    from trial_ray.runs.checkpoints import find_model

    seed = min(run.seed for run in runs)
    pair = {run.method: run for run in runs if run.seed == seed}
    if pair.keys() != {"grpo", "trial"}:
        return None
    config, evaluated = _trial_config(pair["trial"]), pair["trial"].sets[0]
    results = {method: EvaluationResult.load(run.evaluation(evaluated)) for method, run in pair.items()}
    task_id = telling_task(results["grpo"], results["trial"], family)
    entry = pair["trial"].entry(evaluated)
    traces = {
        method_title(method): trace_game(find_model(run.folder), task_id, entry, config).to_dict()
        for method, run in pair.items()
    }
    return {"task_id": task_id, "seed": seed, "traces": traces}


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
