"""A run whose driver is killed repeatedly, also during a checkpoint, ends like an uninterrupted run."""

import random
import signal
import time
from functools import partial

import pytest
import ray
import torch
from cli_fakes import names
from fault_checks import lost_rows, repeatable_metrics
from safetensors.torch import load_file
from tiny_run import driver

from trial_ray.learner.recording import read_training
from trial_ray.rollout.recording import read_turns

pytestmark = pytest.mark.timeout(2400)
KILLS = 6
NEVER = 10_000
"""Number of iterations of the runs."""
MOMENT_TIMEOUT_S = 300.0


def _kill_over_and_over(start, folder):
    """Kill the driver in an iteration and during a checkpoint, and resume each time."""
    draw = random.Random(13)

    def written(kill):
        return len({*folder.glob("checkpoints/.*.partial")} - left if kill % 2 else repeatable_metrics(folder))

    for kill in range(KILLS):
        left = {*folder.glob("checkpoints/.*.partial")}
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


def _without_ids(table):
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
    metrics, expected = map(repeatable_metrics, runs)
    assert metrics == expected
    assert [line["iteration"] for line in metrics] == [*range(1, iterations + 1)]
    assert sum(map(lost_rows, metrics)) == 0
    found, recorded = [], []
    for folder in runs:
        last = folder / f"checkpoints/{iterations:06d}"
        models = [*map(load_file, sorted(last.rglob("*.safetensors")))]
        optimizers = [torch.load(file, weights_only=True) for file in sorted(last.rglob("optimizer.pt"))]
        assert models
        assert optimizers
        found.append((models, optimizers))
        tables = read_turns(folder / "trajectories"), read_training(folder / "training")
        recorded.append([*map(_without_ids, tables)])
    torch.testing.assert_close(*found, rtol=0, atol=0)
    assert recorded[0] == recorded[1]
    assert len(set(recorded[0][0]["success"].to_pylist())) == 2  # rollouts of both outcomes were recorded
    assert names(killed / "checkpoints") == [f"{iteration:06d}" for iteration in (iterations - 1, iterations)]
