"""What a run's folder says of its speed: lengths of rollouts, times of its phases, and steps of its engines."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pyarrow.compute as pc

from trial_ray.errors import UserInputError
from trial_ray.files import checked_content, read_json
from trial_ray.planning.calibration import EngineSteps, RecordedRun
from trial_ray.planning.rates import Arrangement, TurnTokens, Workload
from trial_ray.planning.request import max_batch, most_rows
from trial_ray.rollout.recording import read_turns
from trial_ray.runs.checkpoints import RUN_FILE
from trial_ray.runs.config_record import load_commands
from trial_ray.runs.cost import read_parts
from trial_ray.runs.folder import CONFIG_FILE, RunFolder
from trial_ray.runs.metric_files import recorded_iterations, recorded_metrics

if TYPE_CHECKING:
    from trial_ray.config.run import RunSettings


def recorded_run(path: Path) -> RecordedRun:
    """Read a run's folder, of which one command made all.

    Raises:
        CheckpointError: ``path`` is no run folder, or a file in it is damaged.
        UserInputError: it recorded no trajectories, or another command continued it.
    """
    folder = RunFolder.reopen(path)
    commands, parts = load_commands(folder.path / CONFIG_FILE), read_parts(folder.cost)
    if len(commands) != 1 or len(parts) != 1:
        raise UserInputError(
            f"{folder.path} was made by {len(commands)} commands with {len(parts)} parts in cost.json, expected 1 of each: the "
            "speed of its engines is known of whole runs only. Name a run that was trained by one command to its end."
        )
    settings = commands[0]["settings"]
    engines = [report for name, report in parts[0]["actors"].items() if name.startswith("engine ") and report]
    with checked_content(folder.cost):
        steps = [EngineSteps(**each) for report in engines for each in report.get("steps", {}).values()]
        prompts, cached = (sum(report[name] or 0 for report in engines) for name in ("prompt_tokens", "cached_tokens"))
    with checked_content(folder.path / RUN_FILE):
        cores = int(read_json(folder.path / RUN_FILE)["cores"])
    return RecordedRun(
        workload=recorded_workload(folder.trajectories),
        arrangement=Arrangement.of(cast("RunSettings", SimpleNamespace(**settings)), cores),
        iterations=[recorded_metrics(folder.metrics, number) for number in recorded_iterations(folder.metrics)],
        steps=steps,
        most_rows=max_batch(settings["engine_kwargs"])
        or most_rows(settings["engine"], settings["num_gpus_per_engine"]),
        joins_late=settings["engine"] == "transformers",
        cached_share=min(0.99, cached / prompts) if prompts else 0.0,
    )


def recorded_workload(trajectories: Path) -> Workload:
    """Lengths of all rollouts of a recording that took a turn.

    Raises:
        UserInputError: nothing was recorded, or a file cannot be read.
    """
    table = read_turns(trajectories)
    columns = {name: table[name].to_pylist() for name in ("group_id", "rollout_index")}
    lengths = {name: pc.list_value_length(table[name]).to_pylist() for name in ("prompt_ids", "response_ids")}
    groups: defaultdict[str, defaultdict[int, list[TurnTokens]]] = defaultdict(lambda: defaultdict(list))
    for group, rollout, prompt, response in zip(*columns.values(), *lengths.values(), strict=True):
        groups[group][rollout].append(TurnTokens(prompt, max(1, response)))
    return Workload([list(rollouts.values()) for rollouts in groups.values()])
