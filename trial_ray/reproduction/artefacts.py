"""Artefacts of finished runs: tables as JSON, Markdown and LaTeX; figures as JSON and PNG; allocation traces of a model."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from trial_ray.algorithms.methods import method_title
from trial_ray.algorithms.methods.trial import TRIALConfig
from trial_ray.engines.local import LocalEngine
from trial_ray.engines.protocol import SamplingParams
from trial_ray.environments.guarded import GuardedEnv
from trial_ray.environments.registry import EnvironmentEntry
from trial_ray.errors import InfrastructureError, UserInputError
from trial_ray.evaluation.results import EvaluationResult
from trial_ray.evaluation.table_text import to_latex, to_markdown
from trial_ray.evaluation.tables import ResultTable, TableEntry
from trial_ray.files import write_json, write_text
from trial_ray.learner.connectors import encode_views
from trial_ray.learner.packing import score_rows
from trial_ray.learner.rows import TurnRows, required
from trial_ray.metrics import CURVES, TRAINING_SUCCESS
from trial_ray.models.loading import load_causal_lm, load_tokenizer
from trial_ray.models.vocabulary import stop_tokens_of
from trial_ray.reports.charts import curve, curve_chart, learning, learning_markdown
from trial_ray.reports.plots import figure2, figure3, write_figure
from trial_ray.reports.records import (
    Allocation,
    RunGroup,
    RunRecord,
    Trace,
    TracedTurn,
    choose_trajectories,
    class_means,
)
from trial_ray.reproduction.effects import write_effects, write_runs
from trial_ray.reproduction.studies import PlannedRun
from trial_ray.rollout.conversation import prompt_writer
from trial_ray.rollout.episode import PolicyPlayer, play_episode
from trial_ray.rollout.recording import read_trajectories
from trial_ray.rollout.trajectory import EpisodeResult, Trajectory
from trial_ray.runs.checkpoints import find_model
from trial_ray.runs.folder import RunFolder
from trial_ray.runs.reader import load_groups

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
    if name in ("study", "shape", "pair"):
        made = [*_table(name, done, folder), *_learning(name, done, folder, tried), write_runs(name, done, folder)]
        return [*made, *write_effects(folder)]
    makers = {"figure2": _figure2, "figure3": _figure3}
    return makers[name](done, folder) if name in makers else _table(name, done, folder)


def _table(name: str, runs: Sequence[PlannedRun], folder: Path) -> list[Path]:
    backbones = list(dict.fromkeys(run.backbone for run in runs))
    entries = [
        TableEntry(run.backbone, run.method, run.seed, EvaluationResult.load(run.evaluation(evaluated)))
        for run in sorted(runs, key=lambda run: backbones.index(run.backbone))
        for evaluated in run.sets
    ]
    reference = REFERENCE if any(run.method == REFERENCE for run in runs) else runs[0].method
    table = ResultTable(entries, reference, SUBJECT)
    return [
        write_json(folder / f"{name}.json", {**table.to_dict(), "runs": [run.name for run in runs]}),
        write_text(folder / f"{name}.md", to_markdown(table, method_title)),
        write_text(folder / f"{name}.tex", to_latex(table, method_title)),
    ]


def _learning(name: str, runs: Sequence[PlannedRun], folder: Path, tried: Sequence[Mapping[str, Any]]) -> list[Path]:
    written, parts = [], []
    in_windows = replace(CURVES[TRAINING_SUCCESS], windowed=True)
    for environment, backbone in dict.fromkeys((run.environment, run.backbone) for run in runs):
        methods = {
            run.folder.resolve(): run.method
            for run in runs
            if (run.environment, run.backbone) == (environment, backbone)
        }
        groups = load_groups(list(methods))
        found = {methods[group.runs[0].path]: group for group in groups}
        if REFERENCE not in found:
            continue
        curves = {
            method: {run.seed or 0: curve(run.metrics, TRAINING_SUCCESS) for run in group.runs}
            for method, group in found.items()
        }
        data = learning(curves, REFERENCE, SUBJECT)
        parts.append(f"**{environment}, {backbone}**\n\n{learning_markdown(data, method_title)}")
        several = len({run.backbone for run in runs}) > 1
        file = f"{name}_learning_{environment}{f'_{backbone}' if several else ''}"
        written.append(write_json(folder / f"{file}.json", {**data, "tried": list(tried)}))
        pairs = [[found[REFERENCE], group] for group in groups if group is not found[REFERENCE]]
        charts = [chart for pair in pairs or [groups] if (chart := curve_chart(TRAINING_SUCCESS, pair, in_windows))]
        written += write_figure(folder, file, charts, f"{environment}: success of training rollouts on new games")
    return [*written, write_text(folder / f"{name}_learning.md", "\n".join(parts))]


def _figure2(runs: Sequence[PlannedRun], folder: Path) -> list[Path]:
    groups = load_groups([run.folder for run in runs])
    charts = figure2(groups)
    data = {"runs": [run.name for run in runs], **{chart["name"]: chart["series"] for chart in charts}}
    title = f"{runs[0].backbone}, {runs[0].environment}: {'; '.join(group.title for group in groups)}"
    return [write_json(folder / "figure2.json", data), *write_figure(folder, "figure2", charts, title)]


def _trial_config(run: PlannedRun) -> TRIALConfig:
    assert isinstance(run.config, TRIALConfig)
    return run.config


def _figure3(runs: Sequence[PlannedRun], folder: Path) -> list[Path]:
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

    recorded = RunFolder(run.folder)
    iteration = recorded.recorded_iterations()[-1]
    chosen, family = choose_trajectories(read_trajectories(recorded.trajectories, iteration), FAMILY)
    model = str(find_model(run.folder))
    config = _trial_config(run)
    lm = load_causal_lm(model, config.model_dtype)
    return Allocation(iteration, trace_trajectories(lm, load_tokenizer(model), chosen, config)), family


def _paired_traces(runs: Sequence[PlannedRun], family: str | None) -> dict[str, Any] | None:
    """The first seed of every method, greedily on the first game of the evaluation set that only TRIAL's run solved."""

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
    outcome = " ".join(turn["outcome"].split()).partition(". ")[0][:80]
    return f"{_escaped(shown)} → {_escaped(outcome)} | {turn['score']:.3f} | {turn['weight']:.2f}"


def _escaped(text: str) -> str:
    """Text that Markdown shows as it is."""
    return re.sub(r"([\\`*_\[\]<>|])", r"\\\1", text)


def trace_trajectories(
    lm: PreTrainedModel, tokenizer: Any, trajectories: Sequence[Trajectory], config: TRIALConfig
) -> list[Trace]:
    """Score recorded responses in both views with the given weights, and allocate as the learner does.

    Args:
        lm: the policy; both views are scored by it.
        tokenizer: its tokenizer.
        trajectories: at least one, each with at least one turn.
        config: environment, view, limits, and c of Eq. 4.
    """
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    lengths = torch.tensor([len(trajectory.turns) for trajectory in trajectories])
    trajectory_ids = torch.repeat_interleave(torch.arange(len(trajectories)), lengths)
    rows = TurnRows(turns, trajectory_ids, torch.zeros(len(turns)), encode_views(trajectories, config, tokenizer))
    ordinary, hindsight = score_rows(
        lm,
        rows.model_rows(range(len(rows)), with_evidence=True),
        max_tokens=config.max_tokens_per_forward,
        temperature=config.temperature,
    )
    rows.logprobs, rows.hindsight_logprobs = ordinary.float().cpu(), hindsight.float().cpu()
    config.method_class(config).prepare(rows, [], 1)
    numbers = zip(required(rows.scores).tolist(), required(rows.weights).tolist(), rows.lengths.tolist(), strict=True)
    traces = []
    for trajectory in trajectories:
        adapter, actions = config.adapter_of(trajectory.environment), [turn.action for turn in trajectory.turns]
        classes = adapter.turn_classes(actions, trajectory.ended == "terminated")
        traced = [
            TracedTurn(turn.action, turn.outcome, name, *next(numbers))
            for turn, name in zip(trajectory.turns, classes, strict=True)
        ]
        traces.append(Trace(trajectory.task_id, trajectory.family, trajectory.success, traced))
    return traces


def trace_game(model: Path, task_id: str, entry: EnvironmentEntry, config: TRIALConfig) -> Trace:
    """One game, played greedily by one model in this process, which then scores its own decisions.

    Args:
        model: its folder.
        task_id: the game.
        entry: its environment.
        config: prompts, limits and the hindsight view.

    Raises:
        InfrastructureError: the environment failed.
    """
    lm, tokenizer = load_causal_lm(str(model), config.model_dtype), load_tokenizer(str(model))
    prompts = prompt_writer(tokenizer, config, entry.adapter)
    greedy = SamplingParams(config.max_response_tokens, temperature=0.0)
    engine = LocalEngine(lm, frozenset(stop_tokens_of(lm.config, lm.generation_config, tokenizer)))
    player = PolicyPlayer(prompts, greedy, engine.generate)
    env = GuardedEnv(entry)
    try:
        trajectory = asyncio.run(play_episode(env, task_id, player))
    finally:
        env.close()
    if trajectory.failed:
        raise InfrastructureError(f"The game could not be played: {trajectory.error}")
    (trace,) = trace_trajectories(lm, tokenizer, [trajectory], config)
    return trace
