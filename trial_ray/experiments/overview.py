"""What a run is, before it starts: method, tasks, policy, actors, and the machine or cluster that they run on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from trial_ray.algorithms.methods import method_of, method_title

if TYPE_CHECKING:
    from rich.console import Console

    from trial_ray.algorithms.grpo_config import GRPOConfig
    from trial_ray.experiments.run_folder import RunFolder


def print_overview(
    console: Console, config: GRPOConfig, stop: Mapping[str, float], folder: RunFolder, logged: bool
) -> None:
    """Print a line each: a name and its value.

    Args:
        console: where to print.
        config: validated.
        stop: when training ends.
        folder: the run's.
        logged: whether the output of libraries goes into the folder's log.
    """
    lines = {
        "method": method_title(method_of(config)),
        "tasks": _tasks(config),
        "policy": _policy(config),
        "actors": _actors(config),
        "runs on": _where(),
        "until": " or ".join(_criterion(key, value) for key, value in stop.items()),
        "run folder": str(folder.path),
    }
    if logged:
        lines["log"] = f"{folder.library_log} (what Ray, the engines and other libraries write)"
    for name, value in lines.items():
        console.print(f"{name:<11} {value}", markup=False, highlight=False, soft_wrap=True)


def _tasks(config: GRPOConfig) -> str:
    names = " + ".join(
        f"{entry.env_id} ({entry.config['split']})" if "split" in entry.config else entry.env_id
        for entry in config.environment_entries()
    )
    sampled = f"{config.tasks_per_iteration} tasks × {config.group_size} rollouts an iteration"
    panels = config.panel_entries()
    held_out = f"; {config.panel_num_tasks} held-out tasks before and after" if panels else ""
    return f"{names}, {sampled}{held_out}"


def _policy(config: GRPOConfig) -> str:
    if config.warm_start is None:
        return str(config.model_path)
    base = config.warm_start.get("model_path") or f"the {config.warm_start.get('size', 'tiny')} model"
    return f"{base}, warm-started by cloning a demonstrator"


def _actors(config: GRPOConfig) -> str:
    gpus = {"engine": config.num_gpus_per_engine, "learner": config.num_gpus_per_learner}

    def count(number: int, what: str, kind: str = "") -> str:
        share = f" ({gpus[kind]:g} GPU each)" if gpus.get(kind) else ""
        return f"{number} {what}{'' if number == 1 else 's'}{share}"

    learners = (
        count(config.num_learners, "learner", "learner") if config.num_learners else "the learner in this process"
    )
    return ", ".join(
        (
            count(config.num_env_runners or 0, "env runner"),
            count(config.num_engines, f"{config.engine} engine", "engine"),
            learners,
        )
    )


def _where() -> str:
    address = os.environ.get("RAY_ADDRESS")
    if address:
        return f"the Ray cluster at {address}"
    import psutil

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"this machine: {cores} cores, {psutil.virtual_memory().total / 1e9:.0f} GB of memory"


def _criterion(key: str, value: float) -> str:
    return f"{value:g} iterations" if key == "training_iteration" else f"{key} reaches {value:g}"
