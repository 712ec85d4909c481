"""Run folders with invented household episodes and what training would have recorded of them, without any training."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trial_ray.objectives.advantages import group_relative_advantages
from trial_ray.rollout.hindsight import encode_evidence, outcome_view
from trial_ray.rollout.recording import read_trajectories, read_turns, write_groups
from trial_ray.rollout.trajectory import Trajectory, TrajectoryGroup, Turn

OBJECTS = ("mug", "apple", "creditcard", "book", "pillow", "plate", "watch", "keychain")
FURNITURE = ("countertop", "sidetable", "dresser", "shelf", "drawer", "desk", "sofa", "cabinet")
FAMILIES = ("pick_and_place", "pick_two", "look_at_obj", "pick_heat")
GROUP_SIZE = 8
REASONS = (
    "The goal names it, so it should be near.",
    "Nothing here yet; the next one is close.",
    "It is in my hand now.",
)


def make_run(folder: Path, tokenizer: Any, trajectories: int, iterations: int = 2, seed: int = 0) -> Path:
    """Write a run folder with about as many trajectories, and its training records; returns it.

    Args:
        folder: created.
        tokenizer: of prompts and responses.
        trajectories: a multiple of 8 times ``iterations``.
        iterations: over which they are spread.
        seed: of everything invented.
    """
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps({"schema": "trial_ray/run", "schema_version": 1, "state": "done"}))
    environment = {"env_id": "trial/ALFWorld-v0", "config": {}, "weight": 1.0}
    config = {"method": "trial", "environments": [environment], "settings": {}}
    (folder / "resolved_config.json").write_text(json.dumps(config))
    groups = trajectories // (GROUP_SIZE * iterations)
    for iteration in range(1, iterations + 1):
        # Tasks recur from iteration to iteration, as they do in training.
        played = [_group(rng, tokenizer, 1 + index, iteration / iterations) for index in range(groups)]
        write_groups(folder / "trajectories", iteration, played, "runner001")
        write_training(folder, iteration, tokenizer, rng)
    return folder


def save_tokenizer(run: Path, tokenizer: Any) -> None:
    """Give a run folder a checkpoint of which nothing but the tokenizer is there."""
    checkpoint = run / "checkpoints" / "000001"
    tokenizer.save_pretrained(checkpoint / "learner_group/learner/rl_module/default_policy/hf")
    (checkpoint / "rllib_checkpoint.json").write_text("{}")


def write_training(run: Path, iteration: int, tokenizer: Any, rng: np.random.Generator) -> None:
    """Write ``RUN/training`` for one iteration: gaps that are invented, and what follows from them."""
    turns = read_turns(run / "trajectories", iteration)
    keys = dict.fromkeys(zip(turns["group_id"].to_pylist(), turns["rollout_index"].to_pylist(), strict=True))
    found = dict(zip(keys, read_trajectories(run / "trajectories", iteration), strict=True))
    rows: list[dict[str, Any]] = []
    for group in dict.fromkeys(name for name, _ in found):
        members = {rollout: each for (name, rollout), each in found.items() if name == group}
        returns = np.array([float(each.success) for each in members.values()])
        advantages = group_relative_advantages(*_tensors(returns, np.zeros(len(returns), np.int64)))
        for (rollout, trajectory), advantage in zip(members.items(), advantages.tolist(), strict=True):
            keys = {"group_id": group, "rollout_index": rollout, "advantage": advantage}
            rows += [keys | row for row in _trained(trajectory, tokenizer, rng)]
    lists = {"gap": pa.float32(), "learner_logprobs": pa.float32(), "evidence_ids": pa.int32()}
    plain = {"group_id": pa.string(), "rollout_index": pa.int32(), "turn_index": pa.int32()}
    plain |= dict.fromkeys(("advantage", "turn_score", "turn_weight"), pa.float64())
    fields = plain | {name: pa.list_(kind) for name, kind in lists.items()}
    schema = pa.schema(list(fields.items()), metadata={"trial_ray.schema_version": "1"})
    target = run / "training" / f"iteration={iteration:05d}" / "learner000.parquet"
    target.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), target, compression="zstd")


def _tensors(*arrays: np.ndarray) -> Iterator[Any]:
    import torch

    return (torch.from_numpy(array) for array in arrays)


def _trained(trajectory: Trajectory, tokenizer: Any, rng: np.random.Generator) -> list[dict[str, Any]]:
    last = len(trajectory.turns) - 1
    gaps = [
        (0.06 * rng.standard_normal(len(turn.response_ids)) * rng.choice((0.3, 1.0, 2.5)) + _lean(turn)).astype(
            np.float32
        )
        for turn in trajectory.turns
    ]
    scores = np.array([float(np.abs(gap).mean()) for gap in gaps])
    counts = np.array([len(gap) for gap in gaps])
    weights = scores * counts.sum() / (scores * counts).sum()
    return [
        {
            "turn_index": index,
            "turn_score": float(scores[index]),
            "turn_weight": float(weights[index]),
            "gap": gap.tolist(),
            "learner_logprobs": (turn.logprobs + 0.01 * rng.standard_normal(len(gap))).astype(np.float32).tolist(),
            "evidence_ids": encode_evidence(
                outcome_view(
                    turn.outcome,
                    terminal=index == last and trajectory.ended == "terminated",
                    success=trajectory.success,
                ),
                tokenizer,
            ).tolist(),
        }
        for index, (turn, gap) in enumerate(zip(trajectory.turns, gaps, strict=True))
    ]


def _lean(turn: Turn) -> float:
    """Hindsight speaks for what had an effect and against what had none."""
    return -0.12 if turn.outcome == "Nothing happens." else 0.05


def _group(rng: np.random.Generator, tokenizer: Any, task: int, skill: float) -> TrajectoryGroup:
    thing, goal = OBJECTS[task % len(OBJECTS)], FURNITURE[task // 3 % len(FURNITURE)]
    family = FAMILIES[task % len(FAMILIES)]
    task_id = f"{family}-{thing.title()}-None-{goal.title()}-{task}/trial_T{20190906 + 37 * task}"
    return TrajectoryGroup(
        task_id,
        [_trajectory(rng, tokenizer, task_id, family, thing, goal, rollout, skill) for rollout in range(GROUP_SIZE)],
    )


def _trajectory(
    rng: np.random.Generator, tokenizer: Any, task_id: str, family: str, thing: str, goal: str, seed: int, skill: float
) -> Trajectory:
    success = bool(rng.random() < 0.2 + 0.6 * skill)
    place = str(rng.choice(FURNITURE))
    plan = [
        (f"go to {name} 1", f"You arrive at {name} 1. On the {name} 1, you see nothing.")
        for name in rng.permutation(FURNITURE)
    ]
    plan = plan[: rng.integers(2, 8)]
    plan.insert(rng.integers(len(plan) + 1), (f"take {thing} 2 from {goal} 1", "Nothing happens."))
    plan.append((f"go to {place} 1", f"You arrive at {place} 1. On the {place} 1, you see a {thing} 1."))
    if success:
        plan += [
            (f"take {thing} 1 from {place} 1", f"You pick up the {thing} 1 from the {place} 1."),
            (f"go to {goal} 1", f"You arrive at {goal} 1."),
            (f"move {thing} 1 to {goal} 1", f"You move the {thing} 1 to the {goal} 1."),
        ]
    task = f"put some {thing} on {goal}."
    seen = ", ".join(f"a {name} 1" for name in FURNITURE)
    shown = f"You are in the middle of a room. Looking quickly around you, you see {seen}.\n\nYour task is to: {task}"
    turns: list[Turn] = []
    for index, (action, outcome) in enumerate(plan):
        reward = float(success and index == len(plan) - 1)
        turns.append(_turn(rng, tokenizer, task, shown, action, outcome, reward, turns))
        shown = outcome
    return Trajectory(
        task_id, family, seed, turns, success, float(success), "terminated" if success else "turn_limit",
        solution=(f"go to {place} 1", f"take {thing} 1 from {place} 1", f"go to {goal} 1", f"move {thing} 1 to {goal} 1"),
        environment="ALFWorld-v0",
    )  # fmt: skip


def _turn(
    rng: np.random.Generator,
    tokenizer: Any,
    task: str,
    shown: str,
    action: str,
    outcome: str,
    reward: float,
    turns: list[Turn],
) -> Turn:
    history = "".join(f"[step {len(turns)}] You did: {turn.action}\n" for turn in turns[-1:])
    offered = "\n".join(f"go to {name} 1" for name in FURNITURE)
    message = (
        f"You are an agent who does household chores in ALFWorld, a house described in text.\n\nYour task: {task}\n\n{history}\n"
        f"This is step {len(turns) + 1}. The environment shows:\n{shown}\n\nActions that you can take now:\n{offered}\nlook"
    )
    response = f"<think>{rng.choice(REASONS)}</think><action>{action}</action>"
    before = tokenizer.encode(f"<|user|>{message}")
    prompt = np.array([*before, *tokenizer.encode("<|assistant|>")], np.int32)
    ids = np.array([*tokenizer.encode(response), tokenizer.eos_token_id], np.int32)
    logprobs = -np.abs(rng.standard_normal(len(ids))).astype(np.float32)
    return Turn(
        prompt, ids, logprobs, 1, len(before), shown, action, True, outcome, reward, "stop",
        invalid_action=outcome == "Nothing happens.",
    )  # fmt: skip
