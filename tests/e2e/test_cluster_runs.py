"""Runs side by side on one cluster: each as it would be alone, whatever happens to the others."""

from __future__ import annotations

import signal
from contextlib import ExitStack, closing

import pytest
from ray_nodes import ClusterRun, cluster_of
from safetensors.torch import load_file

from trial_ray.runs.checkpoints import find_model

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1200)]
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


def outcome(run):
    """Metrics of every iteration, without what measures the machine, and the weights."""
    metrics = [
        {name: value for name, value in line.items() if not any(part in name for part in TIMES)}
        for line in run.iterations()
    ]
    weights = load_file(find_model(run.folder) / "model.safetensors")
    return metrics, {name: tensor.numpy().tobytes() for name, tensor in weights.items()}


def test_runs_side_by_side_end_as_they_do_alone(tmp_path):
    with cluster_of("worker") as nodes, ExitStack() as stack:

        def start(name, seed, iterations=8):
            run = ClusterRun(nodes, tmp_path / name, SETTINGS, iterations, "--seed", str(seed))
            return stack.enter_context(closing(run))

        alone = start("alone", 1)
        assert alone.end() == 0, alone.printed
        beside, killed = start("beside", 1), start("killed", 3, 10_000)
        killed.wait_for(bool)
        beside.wait_for(bool)
        killed.process.send_signal(signal.SIGKILL)
        assert beside.end() == 0, beside.printed
    assert len(alone.iterations()) == 8
    assert outcome(alone) == outcome(beside)
