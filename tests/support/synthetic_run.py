"""Run folders as training writes them, with invented household episodes and numbers."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from evaluation_samples import evaluation

from trial_ray.adapters.adapter import EnvironmentAdapter
from trial_ray.adapters.alfworld import ADAPTER
from trial_ray.algorithms import TRIALConfig
from trial_ray.algorithms.methods import with_method
from trial_ray.learner.recording import write_training
from trial_ray.learner.rows import TurnRows
from trial_ray.models.tiny import build_tokenizer
from trial_ray.objectives.advantages import group_relative_advantages
from trial_ray.objectives.allocation import relative_weights, turn_scores
from trial_ray.prompts.teacher_context import encode_teacher_text, outcome_text
from trial_ray.rollout.recording import write_groups
from trial_ray.runs.config_record import to_record
from trial_ray.runs.cost import METRICS, SCHEMA, SCHEMA_VERSION, total_cost
from trial_ray.runs.reader import RecordedRun, RunConfig
from trial_ray.trajectory import TeacherContext, Trajectory, TrajectoryGroup, Turn

OBJECTS = ("mug", "apple", "creditcard", "book", "pillow", "plate", "watch", "keychain")
FURNITURE = ("countertop", "sidetable", "dresser", "shelf", "drawer", "desk", "sofa", "cabinet")
FAMILIES = ("pick_and_place", "pick_two", "look_at_obj", "pick_heat")
GROUP_SIZE = 8
REASONS = (
    "The goal names it, so it should be near.",
    "Nothing here yet; the next one is close.",
    "It is in my hand now.",
)


def recorded_run(path: Path, title: str = "", **parts: Any) -> RecordedRun:
    """Return a run with the given parts, in place of a folder."""
    config = {name: parts.pop(name) for name in RunConfig.__dataclass_fields__ if name in parts}
    if "seed" in parts:
        config["settings"] = {**config.get("settings", {}), "seed": parts.pop("seed")}
    run = RecordedRun(path, title)
    vars(run).update(
        {"metrics": [], "evaluations": {}, "cost": [], "allocation": [], "about": {}, "config": RunConfig(**config)}
    )
    vars(run).update(parts)
    return run


def make_run(folder: Path, tokenizer: Any, trajectories: int, iterations: int = 2, seed: int = 0) -> Path:
    """Write a run folder with trajectories and their training records, and return it.

    Args:
        folder: folder to create.
        tokenizer: tokenizer of prompts and responses.
        trajectories: number of trajectories, a multiple of 8 times ``iterations``.
        iterations: number of iterations.
        seed: seed of the invented values.
    """
    rng = np.random.default_rng(seed)
    environment = {"env_id": "trial/ALFWorld-v0", "config": {}, "weight": 1.0, "name": "ALFWorld-v0"}
    _write(folder / "run.json", {"schema": "trial_ray/run", "schema_version": 1, "state": "done"})
    _write(folder / "resolved_config.json", {"method": "trial", "environments": [environment], "settings": {}})
    for iteration in range(1, iterations + 1):
        # Tasks recur from iteration to iteration, as they do in training.
        _record(folder, tokenizer, rng, iteration, trajectories // (GROUP_SIZE * iterations), iteration / iterations)
    return folder


def _write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def _record(folder: Path, tokenizer: Any, rng: np.random.Generator, iteration: int, tasks: int, skill: float) -> None:
    """Write the trajectories of one iteration and their training records."""
    groups = [_group(rng, tokenizer, task, skill) for task in range(1, 1 + tasks)]
    write_groups(folder / "trajectories", iteration, groups, "runner001")
    rows = _trained(groups, tokenizer, rng)
    write_training(folder / "training", iteration, groups, rows, range(len(rows)), "learner000")


def finished_run(
    path: Path,
    method: str = "trial",
    seed: int = 0,
    iterations: int = 12,
    tasks: int = 64,
    adapter: EnvironmentAdapter | None = None,
    training: bool = True,
    **settings: float,
) -> Path:
    """Write a finished run of ALFWorld, or of the environment of an adapter, with plausible numbers, and return its folder."""
    rng = np.random.default_rng([len(method), seed])
    config = TRIALConfig().environment("trial/ALFWorld-v0", env_config={"split": "generated"}, adapter=adapter)
    config.training(hindsight_start_iteration=START, **settings).debugging(seed=seed).rl_module(model_path="some/model")
    config.recording(trajectories_folder=str(path / "trajectories"))
    _write(path / "resolved_config.json", to_record(with_method(config, method)))
    versions = {"trial-ray": "0.1.0", "ray": "2.60.0", "torch": "2.13.0"}
    _write(path / "run.json", {"state": "done", "python": "3.11.9", "cores": 2, "versions": versions})
    learned = [1 - math.exp(-number / 8) for number in range(1, iterations + 1)]
    lines = [_metrics(number, method, rng, share) for number, share in enumerate(learned, start=1)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, rate, draw in (
        ("before", 0.24, np.random.default_rng(7)),
        (f"after_{iterations:06d}", 0.24 + 0.22 * learned[-1], rng),
    ):
        played = evaluation(draw.random(tasks) < rate, split="generated", families=("pick_and_place_simple", "look"))
        played.save(path / "evaluations" / f"{name}.json")
    _cost(path / "cost.json", lines)
    if training and method != "grpo":
        _record(path, build_tokenizer(ADAPTER.warm_start.vocabulary), rng, iterations, 2, 0.6)
    return path


START = 4
"""Iteration from which the dense term of a finished run acts."""
LEARNER = "learners/default_policy"
SHAPES = {
    "env_runners/success_rate": (0.24, 0.25, 0.03),
    "env_runners/episode_return_mean": (0.24, 0.25, 0.03),
    "env_runners/episode_len_mean": (10, -2, 0.2),
    f"{LEARNER}/grpo/entropy": (0.6, -0.2, 0.01),
    f"{LEARNER}/grpo/kl": (0, 0.002, 0),
    f"{LEARNER}/grpo/clip_fraction": (0.02, 0, 0.001),
    f"{LEARNER}/engine/ratio_mean": (1, 0, 1e-4),
    f"{LEARNER}/engine/ratio_max": (1.01, 0, 1e-3),
    f"{LEARNER}/engine/kl": (1e-6, 0, 1e-8),
    f"{LEARNER}/engine/effective_sample_size": (0.9999, 0, 1e-5),
    "evaluation/env_runners/success_rate": (0.24, 0.22, 0.02),
    f"{LEARNER}/trial/turn_score_mean": (0.24, -0.05, 0.004),
    f"{LEARNER}/trial/turn_weight_std": (0.22, 0.08, 0.004),
    f"{LEARNER}/trial/clamp_saturated_fraction": (0.05, 0, 0.01),
    f"{LEARNER}/trial/dense_loss": (0, 0, 0.01),
}
"""Value of a metric before training, change in training, and noise."""


def _metrics(iteration: int, method: str, rng: np.random.Generator, learned: float) -> dict[str, float]:
    line = {
        key: start + change * learned + noise * rng.standard_normal() for key, (start, change, noise) in SHAPES.items()
    }
    seconds = {
        "seconds/sampling": 6.0,
        "seconds/update": 4.0,
        f"{LEARNER}/scoring/seconds": 1.0,
        f"{LEARNER}/update/seconds": 2.5,
    }
    line |= {"iteration": iteration, **dict.fromkeys(METRICS.values(), 1000.0), **seconds}
    absent = "/trial/" if method == "grpo" else "evaluation/env" if iteration % 5 else "no such metric"
    return {key: value for key, value in line.items() if absent not in key}


def _cost(path: Path, lines: list[dict[str, float]]) -> None:
    number = len(lines)
    each = {"sampling": 6.0, "scoring": 1.0, "update": 2.5, "sync": 0.2}
    seconds = {name: number * value for name, value in each.items()}
    seconds |= {"start": 20.0, "evaluation": 12.0, "checkpoint": 1.0, "other": 2.0}
    part = {
        "iterations": number,
        "seconds": seconds,
        "wall_seconds": sum(seconds.values()),
        "counts": {name: sum(line[key] for line in lines) for name, key in METRICS.items()},
        "learner_hardware": None,
        "actors": {"driver": {"host_bytes": 3 << 30, "device_bytes": None}},
    }
    _write(path, {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, **total_cost([part]), "parts": [part]})


def save_tokenizer(run: Path, tokenizer: Any) -> None:
    """Give a run folder a checkpoint of which nothing but the tokenizer is there."""
    checkpoint = run / "checkpoints" / "000001"
    tokenizer.save_pretrained(checkpoint / "learner_group/learner/rl_module/default_policy/hf")
    (checkpoint / "rllib_checkpoint.json").write_text("{}")


def _trained(groups: list[TrajectoryGroup], tokenizer: Any, rng: np.random.Generator) -> TurnRows:
    """Return the rows of some groups with invented gaps: hindsight speaks against turns that had no effect."""
    played = [trajectory for group in groups for trajectory in group.trajectories]
    owner, turns = [], []
    for index, trajectory in enumerate(played):
        for turn in trajectory.turns:
            terminal = turn is trajectory.turns[-1] and trajectory.ended == "terminated"
            text = outcome_text(turn.outcome, terminal=terminal, success=trajectory.success)
            context = TeacherContext(encode_teacher_text(text, tokenizer), turn.insert_at)
            owner.append(index)
            turns.append(replace(turn, teacher_context=context))
    returns = torch.tensor([float(trajectory.success) for trajectory in played])
    advantages = group_relative_advantages(returns, torch.arange(len(played)) // GROUP_SIZE)
    owners = torch.tensor(owner)
    rows = TurnRows(turns, owners, advantages[owners])
    lean = torch.tensor([-0.12 if turn.invalid_action else 0.05 for turn in turns])
    spread = torch.from_numpy(0.06 * rng.choice((0.3, 1.0, 2.5), len(turns)))
    noise = torch.from_numpy(rng.standard_normal((2, len(rows.turn_ids))))
    gap = spread[rows.turn_ids] * noise[0] + lean[rows.turn_ids]
    rows.logprobs = torch.from_numpy(np.concatenate([turn.logprobs for turn in turns])) + 0.01 * noise[1]
    rows.hindsight_logprobs = rows.logprobs + gap
    rows.scores, counts = turn_scores(gap, rows.mask, rows.turn_ids, len(rows))
    rows.weights = relative_weights(rows.scores, counts, owners)
    return rows


def _group(rng: np.random.Generator, tokenizer: Any, number: int, skill: float) -> TrajectoryGroup:
    """Return a group that looks for an object; its share of successes grows with ``skill``."""
    thing, goal = OBJECTS[number % len(OBJECTS)], FURNITURE[number // 3 % len(FURNITURE)]
    family, task = FAMILIES[number % len(FAMILIES)], f"put some {thing} on {goal}."
    task_id = f"{family}-{thing.title()}-None-{goal.title()}-{number}/trial_T{20190906 + 37 * number}"
    offered = "\n".join(f"go to {name} 1" for name in FURNITURE)
    seen = ", ".join(f"a {name} 1" for name in FURNITURE)

    def plan(place: str, success: bool) -> list[tuple[str, str]]:
        steps = [
            (f"go to {name} 1", f"You arrive at {name} 1. On the {name} 1, you see nothing.")
            for name in rng.permutation(FURNITURE)[: rng.integers(2, 8)]
        ]
        steps.insert(rng.integers(len(steps) + 1), (f"take {thing} 2 from {goal} 1", "Nothing happens."))
        steps.append((f"go to {place} 1", f"You arrive at {place} 1. On the {place} 1, you see a {thing} 1."))
        solution = [
            (f"take {thing} 1 from {place} 1", f"You pick up the {thing} 1 from the {place} 1."),
            (f"go to {goal} 1", f"You arrive at {goal} 1."),
            (f"move {thing} 1 to {goal} 1", f"You move the {thing} 1 to the {goal} 1."),
        ]
        return steps + solution if success else steps

    def play(seed: int) -> Trajectory:
        success, place = bool(rng.random() < 0.2 + 0.6 * skill), str(rng.choice(FURNITURE))
        steps = plan(place, success)
        shown = f"You are in the middle of a room. Looking around you, you see {seen}.\n\nYour task is to: {task}"
        turns: list[Turn] = []
        for index, (action, outcome) in enumerate(steps):
            history = "".join(f"[step {index}] You did: {turn.action}\n" for turn in turns[-1:])
            message = (
                "You are an agent who does household chores in ALFWorld, a house described in text.\n\n"
                f"Your task: {task}\n\n{history}\nThis is step {index + 1}. The environment shows:\n{shown}\n\n"
                f"Actions that you can take now:\n{offered}\nlook"
            )
            response = f"<think>{rng.choice(REASONS)}</think><action>{action}</action>"
            before = tokenizer.encode(f"<|user|>{message}")
            prompt = np.array([*before, *tokenizer.encode("<|assistant|>")], np.int32)
            ids = np.array([*tokenizer.encode(response), tokenizer.eos_token_id], np.int32)
            logprobs = -np.abs(rng.standard_normal(len(ids))).astype(np.float32)
            reward, invalid = float(success and index == len(steps) - 1), outcome == "Nothing happens."
            played = (prompt, ids, logprobs, 1, len(before), shown, action, True, outcome, reward, "stop")
            turns.append(Turn(*played, invalid_action=invalid))
            shown = outcome
        ended = "terminated" if success else "turn_limit"
        solution = tuple(f"go to {place} 1, take {thing} 1 from {place} 1, go to {goal} 1".split(", "))
        outcomes = (turns, success, float(success), ended)
        return Trajectory(task_id, family, seed, *outcomes, solution=solution, environment="ALFWorld-v0")

    return TrajectoryGroup(task_id, [play(seed) for seed in range(GROUP_SIZE)])
