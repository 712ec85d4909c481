"""Runs side by side on one cluster: each as it would be alone, whatever happens to the others."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray_nodes import RayNodes, as_options, cluster_of
from safetensors.torch import load_file

from trial_ray.runs.checkpoints import find_model

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1200)]
ROOT = Path(__file__).parents[2]
EXPERIMENT = "tuned_examples/alfworld_quickstart.py"
ITERATIONS = 8
WAIT_S = 400.0
TIMES = ("time", "seconds", "timestamp", "date", "memory", "pid", "iterations_since_restore")
"""Parts of the names of metrics that measure the machine, or name the process."""
SETTINGS = {
    "engine": "transformers",
    "engine_kwargs": {"max_batch": 1, "num_threads": 1},
    "seeded_sampling": True,
    "evaluation_split": None,
    "env_config": {"split": "generated", "num_games": 16, "difficulty": "tiny", "max_turns": 4},
    "tasks_per_iteration": 2,
    "group_size": 4,
    "hindsight_start_iteration": 1,
    "num_learners": 1,
    **dict.fromkeys(("num_cpus_per_env_runner", "num_cpus_per_engine", "num_cpus_per_learner"), 0.05),
    # Each run is on both nodes.
    "custom_resources_per_env_runner": {"head": 0.1},
    "custom_resources_per_engine": {"worker": 0.1},
    "custom_resources_per_learner": {"worker": 0.1},
}


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with cluster_of("worker") as cluster:
        yield cluster


@pytest.fixture
def start(nodes) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start a run of a seed in a folder; it prints into ``<folder>.log``."""
    started = []

    def start(folder: Path, seed: int, iterations: int = ITERATIONS, **changes: Any) -> subprocess.Popen[bytes]:
        words = ["train", EXPERIMENT, "--out", str(folder), "--seed", str(seed), "--iterations", str(iterations)]
        with folder.with_name(f"{folder.name}-{len(started)}.log").open("wb") as log:
            command = subprocess.Popen(
                ["trial-ray", *words, *as_options({**SETTINGS, **changes})],
                cwd=ROOT,
                env={**nodes.environment, "RAY_ADDRESS": nodes.address},
                stdout=log,
                stderr=log,
            )
        started.append(command)
        return command

    yield start
    for command in started:
        command.kill()
        command.wait()


def outcome(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Metrics of every iteration, without what measures the machine, and the weights."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [{name: value for name, value in line.items() if not any(part in name for part in TIMES)} for line in lines]
    return kept, load_file(find_model(folder) / "model.safetensors")


def assert_same(one: Path, other: Path) -> None:
    (metrics, weights), (other_metrics, other_weights) = outcome(one), outcome(other)
    assert len(metrics) == ITERATIONS
    assert metrics == other_metrics
    assert weights.keys() == other_weights.keys()
    assert all(weights[name].equal(other_weights[name]) for name in weights)


def has_trained(folder: Path) -> bool:
    metrics = folder / "metrics.jsonl"
    return metrics.is_file() and bool(metrics.read_text())


def test_runs_side_by_side_end_as_they_do_alone(start, tmp_path):
    alone = {seed: tmp_path / f"alone-{seed}" for seed in (1, 2)}
    for seed, folder in alone.items():
        assert start(folder, seed).wait(timeout=WAIT_S) == 0, (tmp_path / f"alone-{seed}-{seed - 1}.log").read_text()

    beside = {seed: tmp_path / f"beside-{seed}" for seed in (1, 2)}
    commands = [start(folder, seed) for seed, folder in beside.items()]
    killed, same = tmp_path / "killed", tmp_path / "same"
    doomed = start(killed, 3, iterations=10_000)
    deadline = time.monotonic() + WAIT_S
    while not all(has_trained(folder) for folder in (*beside.values(), killed)):
        assert doomed.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.2)
    doomed.send_signal(signal.SIGKILL)
    rivals = [start(same, 4, iterations=1) for _ in range(2)]
    assert [command.wait(timeout=WAIT_S) for command in commands] == [0, 0]
    for seed in (1, 2):
        assert_same(alone[seed], beside[seed])
    # Of two runs in one folder the second is refused.
    assert sorted(command.wait(timeout=WAIT_S) for command in rivals) == [0, 2]
    assert any("not empty" in log.read_text() or "in use" in log.read_text() for log in tmp_path.glob("same-*.log"))
