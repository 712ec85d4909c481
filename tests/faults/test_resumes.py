"""A run whose driver is killed repeatedly, also during a checkpoint, ends like an uninterrupted run."""

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
from fault_checks import lost_rows, repeatable_metrics
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


def _kill_over_and_over(start: Callable[..., BaseProcess], folder: Path) -> None:
    """Kill the driver in an iteration and during a checkpoint, and resume each time."""
    draw = random.Random(13)

    def written(kill: int) -> int:
        return len(set((folder / "checkpoints").glob(".*.partial")) - left if kill % 2 else repeatable_metrics(folder))

    for kill in range(KILLS):
        left = {*(folder / "checkpoints").glob(".*.partial")}
        before, deadline = written(kill), time.monotonic() + MOMENT_TIMEOUT_S
        process = start(resume=(folder / "run.json").exists())
        try:
            while written(kill) == before:
                assert time.monotonic() < deadline, "the run made no progress"
                time.sleep(0.001)
            time.sleep(draw.uniform(0.0, 0.1 if kill % 2 else 1.0))
        finally:
            process.kill()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL


def _without_ids(table: pa.Table) -> pa.Table:
    """Drop the random ids of groups and the versions of weights, which a resumed run sends once more."""
    return table.drop_columns([name for name in ("group_id", "weight_version") if name in table.column_names])


def test_a_killed_run_ends_like_an_uninterrupted_one(ray_session, model_path, tmp_path):
    runs = killed, _ = tmp_path / "killed", tmp_path / "whole"
    log = tmp_path / "log"
    start = partial(driver, address=ray.get_runtime_context().gcs_address, log=log, model_path=model_path)
    _kill_over_and_over(partial(start, folder=killed, iterations=NEVER), killed)
    iterations = len(repeatable_metrics(killed)) + 2
    for run in runs:
        process = start(folder=run, iterations=iterations, resume=run is killed)
        process.join(MOMENT_TIMEOUT_S)
        assert process.exitcode == 0, log.read_text()[-3000:]
    metrics = [repeatable_metrics(folder) for folder in runs]
    assert metrics[0] == metrics[1]
    assert [line["iteration"] for line in metrics[0]] == list(range(1, len(metrics[0]) + 1))
    assert sum(map(lost_rows, metrics[0])) == 0
    found, recorded = [], []
    for folder in runs:
        last = list_checkpoints(folder / "checkpoints")[-1]
        models = [load_file(file) for file in sorted(last.rglob("*.safetensors"))]
        optimizers = [torch.load(file, weights_only=True) for file in sorted(last.rglob("optimizer.pt"))]
        assert models
        assert optimizers
        found.append((last.name, models, optimizers))
        recorded.append(
            [_without_ids(table) for table in (read_turns(folder / "trajectories"), read_training(folder / "training"))]
        )
    assert found[0][0] == found[1][0] == f"{len(metrics[0]):06d}"
    torch.testing.assert_close(found[0][1:], found[1][1:], rtol=0, atol=0)
    assert all(ours.equals(expected) for ours, expected in zip(*recorded, strict=True))
    assert len(set(recorded[0][0]["success"].to_pylist())) == 2  # rollouts of both outcomes were recorded
    left = sorted(path.name for path in (runs[0] / "checkpoints").iterdir())
    assert left == [f"{iteration:06d}" for iteration in (len(metrics[0]) - 1, len(metrics[0]))]
