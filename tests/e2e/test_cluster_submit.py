"""Jobs that ``cluster/submit.sh`` sends to a cluster of three nodes with token authentication, one of which is lost on the way."""

from __future__ import annotations

import json
import secrets
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray_nodes import RayNodes

ROOT = Path(__file__).parents[2]
EXPERIMENT = "tuned_examples/alfworld_quickstart.py"
SWEEP = "tuned_examples/sweeps/lambda_alpha.py"
RUNNER, ENGINE, LEARNER = "TextEnvRunner", "TransformersEngine", "RayTrainWorker"
NODES = {RUNNER: "head", ENGINE: "worker1", LEARNER: "worker2"}
JOB_S = 400.0

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as folder:
        cluster = RayNodes(Path(folder))
        try:
            cluster.start_head("head")
            cluster.start_worker("worker1")
            cluster.start_worker("worker2")
            cluster.wait_until_ready()
            yield cluster
        finally:
            cluster.stop()


@pytest.fixture(scope="module")
def settings(model_path: str) -> list[str]:
    """A tiny run whose env runner, engine and learner ask for what one node each declares."""
    chosen = {
        "warm_start": None,
        "model_path": model_path,
        "engine": "transformers",
        "panel_split": None,
        "tasks_per_iteration": 2,
        "group_size": 2,
        "hindsight_start_iteration": 1,
        "num_learners": 1,
        "num_cpus_per_env_runner": 0.2,
        "num_cpus_per_engine": 0.2,
        "num_cpus_per_learner": 0.2,
        "num_cpus_for_main_process": 0.2,
        "custom_resources_per_env_runner": {"head": 0.1},
        "custom_resources_per_engine": {"worker1": 0.1},
        "custom_resources_per_learner": {"worker2": 0.1},
    }
    return [part for name, value in chosen.items() for part in ("--set", f"{name}={value}")]


def command(*arguments: str) -> list[str]:
    return [str(ROOT / "cluster" / "submit.sh"), *arguments]


def submit(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), env=environment, capture_output=True, text=True, timeout=JOB_S)
