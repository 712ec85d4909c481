"""A run whose driver is killed repeatedly, also during a checkpoint, ends like an uninterrupted run."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

import pyarrow as pa
import pytest
import ray
import torch
from fault_checks import lost_rows
from safetensors.torch import load_file
from tiny_run import driver

from trial_ray.learner.recording import read_training
from trial_ray.rollout.recording import read_turns
from trial_ray.runs.checkpoints import list_checkpoints

pytestmark = [pytest.mark.faults, pytest.mark.timeout(2400)]
KILLS = 6
NEVER = 10_000
"""Number of iterations of the runs."""
MOMENT_TIMEOUT_S = 300.0
TIMES = ("time", "seconds", "timestamp", "date", "memory", "throughput", "pid", "iterations_since_restore")
"""Parts of the names of metrics that depend on the machine or the process."""


@pytest.fixture(scope="module")
def runs(ray_session, model_path, tmp_path_factory) -> tuple[Path, Path]:
    """Return a run that was killed repeatedly, and an uninterrupted run."""
    folder = tmp_path_factory.mktemp("runs")
    killed, whole, log = folder / "killed", folder / "whole", folder / "log"
    start = partial(driver, address=ray.get_runtime_context().gcs_address, log=log, model_path=model_path)
    _kill_over_and_over(partial(start, folder=killed, iterations=NEVER), killed)
    iterations = len(_metrics(killed)) + 2
    for run in (killed, whole):
        process = start(folder=run, iterations=iterations, resume=run is killed)
        process.join(MOMENT_TIMEOUT_S)
        assert process.exitcode == 0, log.read_text()[-3000:]
    return killed, whole


def _kill_over_and_over(start: Callable[..., BaseProcess], folder: Path) -> None:
    """Kill the driver in an iteration and during a checkpoint, and resume each time."""
    draw = random.Random(13)
    for kill in range(KILLS):
        before, left = len(_metrics(folder)), _partial(folder)
        process = start(resume=(folder / "run.json").exists())
        try:
            if kill % 2:
                _await(lambda left=left: bool(_partial(folder) - left))
                time.sleep(draw.uniform(0.0, 0.1))
            else:
                _await(lambda before=before: len(_metrics(folder)) > before)
                time.sleep(draw.uniform(0.0, 1.0))
        finally:
            process.kill()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL


def _await(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + MOMENT_TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "the run made no progress"
        time.sleep(0.001)


def _partial(folder: Path) -> set[Path]:
    return {*(folder / "checkpoints").glob(".*.partial")}


def _metrics(folder: Path) -> list[dict]:
    """Return the metrics of every iteration, without metrics that depend on the machine."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    whole = [json.loads(line) for line in lines if line.endswith("\n")]
    return [{name: value for name, value in line.items() if not any(part in name for part in TIMES)} for line in whole]


def _without_ids(table: pa.Table) -> pa.Table:
    """Drop the random ids of groups and the versions of weights, which a resumed run sends once more."""
    return table.drop_columns([name for name in ("group_id", "weight_version") if name in table.column_names])


def test_weights_and_metrics_equal_those_of_an_uninterrupted_run(runs):
    metrics = [_metrics(folder) for folder in runs]
    assert metrics[0] == metrics[1]
    assert [line["iteration"] for line in metrics[0]] == list(range(1, len(metrics[0]) + 1))
    assert len(metrics[0][0]) > 60
    assert sum(map(lost_rows, metrics[0])) == 0
    found = []
    for folder in runs:
        last = list_checkpoints(folder / "checkpoints")[-1]
        models = [load_file(file) for file in sorted(last.rglob("*.safetensors"))]
        optimizers = [torch.load(file, weights_only=True) for file in sorted(last.rglob("optimizer.pt"))]
        assert models
        assert optimizers
        found.append((last.name, models, optimizers))
    assert found[0][0] == found[1][0] == f"{len(metrics[0]):06d}"
    torch.testing.assert_close(found[0][1:], found[1][1:], rtol=0, atol=0)
    left = sorted(path.name for path in (runs[0] / "checkpoints").iterdir())
    assert left == [f"{iteration:06d}" for iteration in (len(metrics[0]) - 1, len(metrics[0]))]


def test_trajectories_equal_those_of_an_uninterrupted_run(runs):
    killed, whole = (_without_ids(read_turns(folder / "trajectories")) for folder in runs)
    assert killed.equals(whole)
    assert len(set(killed["success"].to_pylist())) == 2  # rollouts of both outcomes were recorded
    killed, whole = (_without_ids(read_training(folder / "training")) for folder in runs)
    assert killed.equals(whole)
