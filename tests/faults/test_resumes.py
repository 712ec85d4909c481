"""A run whose driver is killed at twenty moments, also while it writes a checkpoint, ends as one that nobody disturbed."""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
import ray
import torch
from fault_table import lost_rows
from safetensors.torch import load_file
from tiny_run import drivers

from trial_ray.learner.recording import read_training
from trial_ray.rollout.recording import read_turns
from trial_ray.runs.checkpoints import list_checkpoints

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1500)]
KILLS = 20
NEVER = 10_000
"""Iterations after which a run that is killed again and again would end."""
MOMENT_TIMEOUT_S = 300.0
TIMES = ("time", "seconds", "timestamp", "date", "memory", "throughput", "pid", "iterations_since_restore")
"""Parts of the names of metrics that measure the machine, or name the process, and say nothing of the run."""


@pytest.fixture(scope="module")
def runs(ray_session, model_path, tmp_path_factory):
    """A run that was killed over and over, and one that was not."""
    folder = tmp_path_factory.mktemp("runs")
    address = ray.get_runtime_context().gcs_address
    with drivers(address, folder / "drivers.log") as made:
        killed, whole = folder / "killed", folder / "whole"
        moments, seconds = _kill_over_and_over(made, killed, {"model_path": model_path, "iterations": NEVER})
        end = {"model_path": model_path, "iterations": _iterations(killed) + 2}
        made.start(folder=str(killed), resume=True, **end)
        assert made.wait() == 0, (folder / "drivers.log").read_text()[-3000:]
        made.start(folder=str(whole), resume=False, **end)
        assert made.wait() == 0
        return SimpleNamespace(
            killed=killed, whole=whole, moments=moments, seconds=seconds, iterations=end["iterations"]
        )


def _kill_over_and_over(made, folder: Path, start: dict) -> tuple[list[str], list[float]]:
    """Kill the driver, resume, kill it again; returns the moments (at which iteration, doing what), and what resuming took.

    That is from the start of the driver to the end of its first iteration, in seconds.
    """
    draw, moments, seconds = random.Random(13), [], []
    for kill in range(KILLS):
        resume = (folder / "run.json").exists()
        before, left = _iterations(folder), _partial(folder)
        began = time.monotonic()
        pid = made.start(folder=str(folder), resume=resume, **start)
        if kill % 2:
            found = _await(partial(_writes_checkpoint, folder, left))
            time.sleep(draw.uniform(0.0, 0.1))
            moments.append(f"writing a checkpoint after iteration {_iterations(folder)}")
        else:
            found = _await(partial(_is_beyond, folder, before))
            seconds += [time.monotonic() - began] if resume else []
            time.sleep(draw.uniform(0.0, 1.0))
            moments.append(f"in the iteration after {_iterations(folder)}")
        assert found, f"kill {kill}: the run made no progress"
        os.kill(pid, signal.SIGKILL)
        assert made.wait() == -signal.SIGKILL, moments
    return moments, seconds


def _await(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + MOMENT_TIMEOUT_S
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.001)
    return False


def _partial(folder: Path) -> set[Path]:
    return {*(folder / "checkpoints").glob(".*.partial")}


def _writes_checkpoint(folder: Path, left: set[Path]) -> bool:
    return bool(_partial(folder) - left)


def _is_beyond(folder: Path, iteration: int) -> bool:
    return _iterations(folder) > iteration


def _iterations(folder: Path) -> int:
    """Of the last whole line of metrics."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return max((json.loads(line)["iteration"] for line in lines if line.endswith("\n")), default=0)


def _metrics(folder: Path) -> list[dict]:
    """Every iteration's, without what measures the machine."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not any(part in name for part in TIMES)} for line in lines]


def _without_ids(table: pa.Table) -> pa.Table:
    """Groups get ids at random, and a resumed run sends its weights once more, under the next version."""
    return table.drop_columns([name for name in ("group_id", "weight_version") if name in table.column_names])


def test_it_was_killed_at_twenty_moments(runs, tell):
    print("\n".join(runs.moments))
    assert len(runs.moments) == KILLS
    assert sum("checkpoint" in moment for moment in runs.moments) == KILLS // 2
    lost = sum(lost_rows(line) for line in _metrics(runs.killed))
    for moment in ("in an iteration", "writing a checkpoint"):
        tell(
            f"SIGKILL of the driver, {KILLS // 2} times",
            moment,
            "--resume; same run",
            statistics.mean(runs.seconds),
            lost,
        )


def test_weights_are_those_of_an_undisturbed_run(runs):
    found = {}
    for folder in (runs.killed, runs.whole):
        last = list_checkpoints(folder / "checkpoints")[-1]
        assert last.name == f"{runs.iterations:06d}"
        models = [load_file(file) for file in sorted(last.rglob("*.safetensors"))]
        optimizers = [torch.load(file, weights_only=True) for file in sorted(last.rglob("optimizer.pt"))]
        assert models
        assert optimizers
        found[folder] = models, optimizers
    killed, whole = found.values()
    torch.testing.assert_close(killed, whole, rtol=0, atol=0)


def test_metrics_and_counters_are_those_of_an_undisturbed_run(runs):
    killed, whole = _metrics(runs.killed), _metrics(runs.whole)
    assert [line["iteration"] for line in killed] == list(range(1, runs.iterations + 1))
    assert len(killed[0]) > 60
    for one, other in zip(killed, whole, strict=True):
        assert one == other


def test_tasks_and_recorded_trajectories_are_those_of_an_undisturbed_run(runs):
    killed, whole = (_without_ids(read_turns(folder / "trajectories")) for folder in (runs.killed, runs.whole))
    assert killed["task_id"].equals(whole["task_id"])
    assert killed.equals(whole)
    assert len(set(killed["success"].to_pylist())) == 2  # there was something to learn
    killed, whole = (_without_ids(read_training(folder / "training")) for folder in (runs.killed, runs.whole))
    assert killed.equals(whole)


def test_nothing_is_left_of_what_the_killed_drivers_were_writing(runs):
    left = sorted(path.name for path in (runs.killed / "checkpoints").iterdir())
    assert left == [f"{iteration:06d}" for iteration in (runs.iterations - 1, runs.iterations)]
