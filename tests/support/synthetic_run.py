"""Run folders as training writes them, with invented household episodes and numbers."""

import json
from dataclasses import replace

import numpy as np
import torch
from evaluation_samples import evaluation
from nano_model import tiny_tokenizer

from trial_ray.algorithms import TRIALConfig
from trial_ray.algorithms.methods import with_method
from trial_ray.files import write_json
from trial_ray.learner.recording import write_training
from trial_ray.learner.rows import group_turn_rows
from trial_ray.prompts.teacher_context import encode_teacher_text, outcome_text
from trial_ray.reports.charts import CURVES
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


def recorded_run(path, title="", **parts):
    """Return a run with the given parts, in place of a folder."""
    config = {name: parts.pop(name) for name in RunConfig.__dataclass_fields__ if name in parts}
    run = RecordedRun(path, title)
    empty = {"metrics": [], "evaluations": {}, "cost": [], "allocation": [], "about": {}}
    vars(run).update({**empty, "config": RunConfig(**config), **parts})
    return run


def one_turn_groups(texts, encode=lambda text: [1, 2]):
    """Return a group of one turn for each text, which is in every field that an environment, a policy or a user fills."""

    def played(text):
        ids = np.array(encode(text), np.int32)
        turn = Turn(ids, ids, np.zeros(len(ids), np.float32), 1, len(ids) // 2, text, text, False, text, 1.0, "stop")
        return Trajectory(text, text, 0, [turn], success=True, environment=text, solution=(text,), error=text)

    return [TrajectoryGroup(text, [played(text)]) for text in texts]


def make_run(folder, tokenizer, trajectories, iterations=2, seed=0):
    """Write a run folder with trajectories, their training records and a tokenizer, and return it.

    Args:
        folder: folder to create.
        tokenizer: tokenizer of prompts and responses.
        trajectories: number of trajectories, a multiple of 8 times ``iterations``.
        iterations: number of iterations.
        seed: seed of the invented values.
    """
    rng = np.random.default_rng(seed)
    environment = {"env_id": "trial/ALFWorld-v0", "config": {}, "weight": 1.0, "name": "ALFWorld-v0"}
    write_json(folder / "run.json", {"schema": "trial_ray/run", "schema_version": 1, "state": "done"})
    write_json(folder / "resolved_config.json", {"method": "trial", "environments": [environment], "settings": {}})
    for iteration in range(1, iterations + 1):
        # Tasks recur from iteration to iteration, as they do in training.
        _record(folder, tokenizer, rng, iteration, trajectories // (GROUP_SIZE * iterations), iteration / iterations)
    # The checkpoint folder contains only the tokenizer.
    checkpoint = folder / "checkpoints/000001"
    tokenizer.save_pretrained(checkpoint / "learner_group/learner/rl_module/default_policy/hf")
    (checkpoint / "rllib_checkpoint.json").write_text("{}")
    return folder


def _record(folder, tokenizer, rng, iteration, tasks, skill):
    """Write the trajectories of one iteration and their training records."""
    groups = [_group(rng, tokenizer, task, skill) for task in range(1, 1 + tasks)]
    write_groups(folder / "trajectories", iteration, groups, "runner001")
    rows = _trained(groups, tokenizer, rng)
    write_training(folder / "training", iteration, groups, rows, range(len(rows)), "learner000")


def finished_run(path, method, seed, iterations):
    """Write a finished run of ALFWorld with plausible numbers, and return its folder."""
    rng = np.random.default_rng([len(method), seed])
    config = TRIALConfig().environment("trial/ALFWorld-v0", env_config={"split": "generated"})
    config.training(hindsight_start_iteration=START).debugging(seed=seed).rl_module(model_path="some/model")
    config.recording(trajectories_folder=f"{path}/trajectories")
    write_json(path / "resolved_config.json", to_record(with_method(config, method)))
    versions = {"trial-ray": "0.1.0", "ray": "2.60.0"}
    write_json(path / "run.json", {"state": "done", "python": "3.11.9", "versions": versions})
    lines = [_metrics(number, method, rng) for number in range(1, iterations + 1)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, rate, draw in ("before", 0.24, np.random.default_rng(7)), (f"after_{iterations:06d}", 0.4, rng):
        played = evaluation(draw.random(64) < rate, split="generated", families=("pick_and_place_simple", "look"))
        played.save(path / "evaluations" / f"{name}.json")
    _cost(path / "cost.json", lines)
    if method != "grpo":
        _record(path, tiny_tokenizer(), rng, iterations, 2, 0.6)
    return path


START = 4
"""Iteration from which the dense term of a finished run acts."""


def _metrics(iteration, method, rng):
    absent = "/trial/" if method == "grpo" else "evaluation/env" if iteration % 5 else "no such metric"
    drawn = {key: 0.2 + 0.02 * iteration + 0.03 * rng.standard_normal() for key in CURVES if absent not in key}
    return {**drawn, "iteration": iteration, **dict.fromkeys(METRICS.values(), 1000.0)}


def _cost(path, lines):
    phases = ("sampling", "scoring", "update", "sync", "start", "evaluation", "checkpoint", "other")
    seconds = {name: float(number) for number, name in enumerate(phases, start=1)}
    part = {
        "iterations": len(lines),
        "seconds": seconds,
        "wall_seconds": sum(seconds.values()),
        "counts": {name: sum(line[key] for line in lines) for name, key in METRICS.items()},
        "learner_hardware": None,
        "actors": {"driver": {"host_bytes": 3 << 30, "device_bytes": None}},
    }
    write_json(path, {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, **total_cost([part]), "parts": [part]})


def _trained(groups, tokenizer, rng):
    """Return the rows of some groups with invented gaps."""
    config = TRIALConfig()
    rows = group_turn_rows(groups, config)
    for index, turn in enumerate(rows.turns):
        evidence = encode_teacher_text(outcome_text(turn.outcome, terminal=False, success=False), tokenizer)
        rows.turns[index] = replace(turn, teacher_context=TeacherContext(evidence, turn.insert_at))
    spread = torch.from_numpy(0.06 * rng.choice((0.3, 1.0, 2.5), len(rows)))
    gap = spread[rows.turn_ids] * torch.from_numpy(rng.standard_normal(len(rows.turn_ids)))
    rows.logprobs = torch.from_numpy(np.concatenate([turn.logprobs for turn in rows.turns])) + 0.01
    rows.hindsight_logprobs = rows.logprobs + gap
    config.method_class(config).prepare(rows, groups, 1)
    return rows


def _group(rng, tokenizer, number, skill):
    """Return a group that looks for an object; its share of successes grows with ``skill``."""
    thing, goal = OBJECTS[number % len(OBJECTS)], FURNITURE[number // 3 % len(FURNITURE)]
    family, task = FAMILIES[number % len(FAMILIES)], f"put some {thing} on {goal}."
    task_id = f"{family}-{thing.title()}-None-{goal.title()}-{number}"
    offered = "\n".join(f"go to {name} 1" for name in FURNITURE)
    won = [
        (f"take {thing} 1 from shelf 1", f"You pick up the {thing} 1 from the shelf 1."),
        (f"move {thing} 1 to {goal} 1", f"You move the {thing} 1 to the {goal} 1."),
    ]

    def play(seed):
        success = bool(rng.random() < 0.2 + 0.6 * skill)
        steps = [
            (f"go to {name} 1", f"You arrive at {name} 1. On the {name} 1, you see nothing.")
            for name in rng.permutation(FURNITURE)[: rng.integers(4, 9)]
        ]
        steps.insert(rng.integers(len(steps) + 1), (f"take {thing} 2 from {goal} 1", "Nothing happens."))
        shown = f"You are in the middle of a room.\n\nYour task is to: {task}"
        turns = []
        for index, (action, outcome) in enumerate(steps + won if success else steps):
            message = (
                "You are an agent who does household chores in ALFWorld, a house described in text.\n\n"
                f"Your task: {task}\n\nThis is step {index + 1}. The environment shows:\n{shown}\n\n"
                f"Actions that you can take now:\n{offered}\nlook"
            )
            before = tokenizer.encode(f"<|user|>{message}")
            prompt = np.array([*before, *tokenizer.encode("<|assistant|>")], np.int32)
            response = tokenizer.encode(f"<think>{rng.choice(REASONS)}</think><action>{action}</action>")
            ids = np.array([*response, tokenizer.eos_token_id], np.int32)
            logprobs = -np.abs(rng.standard_normal(len(ids))).astype(np.float32)
            turns.append(
                Turn(
                    prompt, ids, logprobs, 1, len(before), shown, action, True, outcome, float(outcome == won[-1][1]), "stop",
                    invalid_action=outcome == "Nothing happens.",
                )
            )  # fmt: skip
            shown = outcome
        return Trajectory(
            task_id, family, seed, turns, success, float(success), "terminated" if success else "turn_limit",
            solution=tuple(action for action, _ in won), environment="ALFWorld-v0",
        )  # fmt: skip

    return TrajectoryGroup(task_id, [play(seed) for seed in range(GROUP_SIZE)])
