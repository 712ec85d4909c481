"""Processes that hang while a run waits for them: the run says so, ends them and goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from faulty_env import CountingEnv
from faulty_run import FaultyRun, send, tiny_config
from user_env import registered

from trial_ray.algorithms.actors import ENGINE, ENV_RUNNER
from trial_ray.runs.folder import RunFolder

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("ray_session"), pytest.mark.timeout(1800)]
STALL_S = 45.0


def test_an_engine_and_an_env_runner_that_hang_are_replaced(model_path, tmp_path, tell):
    with registered(CountingEnv):
        run = FaultyRun(tmp_path / "run", tiny_config(model_path, stall_timeout_s=STALL_S), 3)
        stop = signal.SIGSTOP
        seconds = run.run_with((1, "sampling", 2, send(ENGINE, stop)), (1, "sampling", 3, send(ENV_RUNNER, stop)))
    printed = run.printed.getvalue()
    print(printed)
    assert len(run.algorithms) == 1
    assert printed.count(f"no progress for {STALL_S:g} s (sampling); ending env runner 1, engine 0, so that") == 2
    assert "restart 1 of" not in printed  # the line on what was replaced quotes Ray
    reports = sorted((run.folder.path / "logs").glob("stall-*.txt"))
    of_engine, of_runner = (report.read_text() for report in reports)
    assert "sample_groups" in of_engine.partition("--- env runner 1:")[2]
    assert "stopped; it writes no stacks" in of_engine.partition("--- engine 0:")[2]
    assert "stopped; it writes no stacks" in of_runner.partition("--- env runner 1:")[2].partition("\n---")[0]
    assert "_sample" in of_runner.partition("--- driver:")[2].partition("\n---")[0]
    assert run.folder.state() == "done"
    for kind, each in zip(("engine", "env runner"), seconds, strict=True):
        tell(
            f"SIGSTOP of the only {kind}, stall_timeout_s={STALL_S:g}",
            "sampling",
            "replaced; goes on",
            each,
            run.lost(),
        )


HUNG_DRIVER = """
import sys, time
from pathlib import Path
import ray
from faulty_env import CountingEnv
from faulty_run import FaultyRun, tiny_config
from user_env import registered
from trial_ray.algorithms import GRPO

def hang(*arguments, **named):
    Path(sys.argv[3]).write_text(str(time.time()))
    while True:
        time.sleep(1)

GRPO.training_step, model_path, folder = hang, sys.argv[1], Path(sys.argv[2])
ray.init(num_cpus=2, object_store_memory=150_000_000, include_dashboard=False, log_to_driver=False)
with registered(CountingEnv):
    FaultyRun(folder, tiny_config(model_path, stall_timeout_s=5.0), 2).run_with()
"""


def test_a_driver_that_hangs_itself_ends_with_a_report(model_path, tmp_path, tell):
    """Nothing can be replaced: actors are ended in vain, then the process ends, and its Ray with it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("RAY_ADDRESS", None)
    run, began = tmp_path / "run", tmp_path / "began"
    done = subprocess.run(
        [sys.executable, "-c", HUNG_DRIVER, model_path, str(run), str(began)],
        env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    seconds = time.time() - float(began.read_text())
    assert done.returncode == 1, done.stderr
    assert RunFolder.reopen(run).state() == "failed"
    assert "stopping with exit code 1" in (run / "error.log").read_text()
    last = sorted((run / "logs").glob("stall-*.txt"))[-1].read_text()
    assert "in hang" in last.partition("--- driver")[2]
    tell("the driver hangs, stall_timeout_s=5", "iteration", "report; exit 1", seconds)
