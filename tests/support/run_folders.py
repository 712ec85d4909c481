"""Run folders as training leaves them, with numbers that look like a run's, for reports."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trial_ray.algorithms import TRIALConfig
from trial_ray.algorithms.methods import with_method
from trial_ray.environments.adapter import EnvironmentAdapter
from trial_ray.evaluation.results import EvaluationResult
from trial_ray.learner.recording import TRAINING_SCHEMA
from trial_ray.rollout.recording import write_groups
from trial_ray.rollout.trajectory import EpisodeResult, Trajectory, TrajectoryGroup, Turn
from trial_ray.runs.config_record import to_record
from trial_ray.runs.cost import METRICS, SCHEMA, SCHEMA_VERSION, total_cost

FAMILIES = ("pick_and_place_simple", "look_at_obj_in_light")
LEARNER = "learners/default_policy"
ACTIONS = ("go to shelf 1", "take mug 1 from shelf 1", "go to desk 1", "examine desk 1", "move mug 1 to desk 1")
START = 4
"""Iteration from which the dense term acts."""


def make_run(
    path: Path,
    method: str = "trial",
    seed: int = 0,
    iterations: int = 12,
    tasks: int = 64,
    adapter: EnvironmentAdapter | None = None,
    training: bool = True,
    **settings: float,
) -> Path:
    """A finished run of ALFWorld, or of the environment of an adapter."""
    path.mkdir(parents=True)
    draw = random.Random(f"{method} {seed}")
    config = TRIALConfig().environment("trial/ALFWorld-v0", env_config={"split": "generated"}, adapter=adapter)
    config.training(hindsight_start_iteration=START, **settings).debugging(seed=seed).rl_module(model_path="some/model")
    config.recording(trajectories_folder=str(path / "trajectories"))
    record = to_record(with_method(config, method))
    _write(path / "resolved_config.json", record)
    versions = {"trial-ray": "0.1.0", "ray": "2.60.0", "torch": "2.13.0"}
    _write(path / "run.json", {"state": "done", "python": "3.11.9", "cores": 2, "versions": versions})
    lines = [_metrics(number, method, draw) for number in range(1, iterations + 1)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    _evaluate(path / "evaluations" / "before.json", 0.24, tasks, random.Random(7))
    _evaluate(path / "evaluations" / f"after_{iterations:06d}.json", 0.24 + 0.22 * _learned(iterations), tasks, draw)
    _cost(path / "cost.json", lines)
    if training and method != "grpo":
        _record(path, iterations, draw)
    return path


def _write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def _learned(iteration: int) -> float:
    return 1 - math.exp(-iteration / 8)


def _metrics(iteration: int, method: str, draw: random.Random) -> dict[str, float]:
    learned = _learned(iteration)
    line = {
        "iteration": iteration,
        "env_runners/success_rate": 0.24 + 0.25 * learned + draw.gauss(0, 0.03),
        "env_runners/episode_return_mean": 0.24 + 0.25 * learned + draw.gauss(0, 0.03),
        "env_runners/episode_len_mean": 10 - 2 * learned + draw.gauss(0, 0.2),
        f"{LEARNER}/grpo/entropy": 0.6 - 0.2 * learned + draw.gauss(0, 0.01),
        f"{LEARNER}/grpo/kl": 0.002 * learned,
        f"{LEARNER}/grpo/clip_fraction": 0.02 + draw.random() * 0.01,
        f"{LEARNER}/engine/ratio_mean": 1 + draw.gauss(0, 1e-4),
        f"{LEARNER}/engine/ratio_max": 1.01 + draw.random() * 0.01,
        f"{LEARNER}/engine/kl": 1e-6 * draw.random(),
        f"{LEARNER}/engine/effective_sample_size": 1 - 1e-4 * draw.random(),
        "seconds/sampling": 6.0,
        "seconds/update": 4.0,
        **{key: 1000.0 for key in METRICS.values() if "seconds" not in key},
        f"{LEARNER}/scoring/seconds": 1.0,
        f"{LEARNER}/update/seconds": 2.5,
    }
    if iteration % 5 == 0:
        line["evaluation/env_runners/success_rate"] = 0.24 + 0.22 * learned + draw.gauss(0, 0.02)
    if method != "grpo":
        line[f"{LEARNER}/trial/turn_score_mean"] = 0.24 - 0.05 * learned + draw.gauss(0, 0.004)
        line[f"{LEARNER}/trial/turn_weight_std"] = 0.22 + 0.08 * learned + draw.gauss(0, 0.004)
        line[f"{LEARNER}/trial/clamp_saturated_fraction"] = 0.05 * draw.random() if iteration >= START else 0.0
        line[f"{LEARNER}/trial/dense_loss"] = 0.01 * draw.gauss(0, 1)
    return line


def _evaluate(path: Path, rate: float, tasks: int, draw: random.Random) -> None:
    episodes = []
    for index in range(tasks):
        won = draw.random() < rate
        episodes.append(EpisodeResult(f"game-{index}", FAMILIES[index % 2], won, float(won), 9, "terminated"))
    protocol = {"env": "trial/ALFWorld-v0", "split": "generated", "num_tasks": tasks}
    EvaluationResult(protocol, episodes).save(path)


def _cost(path: Path, lines: list[dict[str, float]]) -> None:
    number = len(lines)
    seconds = {
        "start": 20.0,
        "sampling": 6.0 * number,
        "scoring": 1.0 * number,
        "update": 2.5 * number,
        "sync": 0.2 * number,
    }
    seconds |= {"evaluation": 12.0, "checkpoint": 1.0, "other": 2.0}
    part = {
        "iterations": number,
        "seconds": seconds,
        "wall_seconds": sum(seconds.values()),
        "counts": {name: sum(line[key] for line in lines) for name, key in METRICS.items()},
        "learner_hardware": None,
        "actors": {"driver": {"host_bytes": 3 << 30, "device_bytes": None}},
    }
    head = {"schema": SCHEMA, "schema_version": SCHEMA_VERSION}
    _write(path, {**head, **total_cost([part]), "parts": [part]})


def _record(path: Path, iteration: int, draw: random.Random) -> None:
    """Trajectories of one iteration, and the weights that training gave to their turns."""
    groups = [
        TrajectoryGroup(f"game-{task}", [_trajectory(f"game-{task}", task % 2, draw) for _ in range(4)])
        for task in range(4)
    ]
    file = write_groups(path / "trajectories", iteration, groups, "runner001")
    turns = pq.read_table(file, columns=["group_id", "rollout_index", "turn_index"], partitioning=None).to_pylist()
    rows = []
    for turn in turns:
        score = 0.3 * draw.random()
        rows.append({**turn, "turn_score": score, "turn_weight": score / 0.15})
    folder = path / "training" / f"iteration={iteration:05d}"
    folder.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=TRAINING_SCHEMA), folder / "learner00.parquet")


def _trajectory(task: str, family: int, draw: random.Random) -> Trajectory:
    ids = np.zeros(4, np.int32)
    actions = [draw.choice(ACTIONS) for _ in range(10)]
    turns = [
        Turn(
            ids, ids, ids.astype(np.float32), 0, 0, "You are in a room.", action, True, "You see a mug 1.", 0.0, "stop"
        )
        for action in actions
    ]
    won = draw.random() < 0.6
    return Trajectory(task, FAMILIES[family], 0, turns, won, float(won), environment="ALFWorld-v0")
