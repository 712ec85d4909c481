"""Learners that are killed, and processes that hang: the run says so and goes on by itself, to the same weights."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from faulty_env import CountingEnv
from faulty_run import FaultyRun, send, tiny_config
from user_env import registered

from trial_ray.algorithms.actors import ENGINE, ENV_RUNNER, LEARNER
from trial_ray.errors import LearnerError
from trial_ray.runs.folder import RunFolder

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("ray_session"), pytest.mark.timeout(1800)]
ITERATIONS = 3


@pytest.fixture(scope="module", autouse=True)
def environment(ray_session):
    with registered(CountingEnv):
        yield


@pytest.fixture(scope="module")
def uninterrupted(model_path, tmp_path_factory) -> bytes:
    """Weights of a run without a fault."""
    run = FaultyRun(tmp_path_factory.mktemp("runs") / "run", tiny_config(model_path, num_learners=2), ITERATIONS)
    run.run_with()
    return run.weights()


def iterations(run: FaultyRun) -> list[int]:
    return [json.loads(line)["iteration"] for line in run.folder.metrics.read_text().splitlines()]


def test_a_killed_learner_restarts_the_run_from_its_checkpoint(uninterrupted, model_path, tmp_path, tell):
    run = FaultyRun(tmp_path / "run", tiny_config(model_path, num_learners=2), ITERATIONS)
    kill = send(LEARNER, signal.SIGKILL)
    seconds = run.run_with((1, "sampling", 1, kill), (2, "update", 3, kill))
    printed = run.printed.getvalue()
    print(printed)
    assert len(run.algorithms) == 3
    assert "restart 1 of at most 3: learner 0 died in the update of iteration 1; going on from the initial" in printed
    assert "restart 2 of at most 3: learner 0 died in the update of iteration 3; going on from /" in printed
    assert f"{run.folder.checkpoints}/000002" in printed.partition("restart 2")[2]
    logs = run.folder.path / "logs"
    assert all("ActorDiedError" in (logs / f"restart-{number}.log").read_text() for number in (1, 2))
    assert iterations(run) == run.folder.recorded_iterations() == [1, 2, 3]
    assert run.folder.state() == "done"
    assert run.weights() == uninterrupted
    for moment, each in zip(("sampling, no checkpoint yet", "update"), seconds, strict=True):
        tell("SIGKILL of one of two learners", moment, "restart; same weights", each, run.lost())


def test_a_learner_that_hangs_is_ended(uninterrupted, model_path, tmp_path, tell):
    config = tiny_config(model_path, num_learners=2, stall_timeout_s=20.0)
    run = FaultyRun(tmp_path / "run", config, ITERATIONS)
    [seconds] = run.run_with((1, "update", 2, send(LEARNER, signal.SIGSTOP, 1)))
    print(run.printed.getvalue())
    assert "no progress for 20 s (update); ending " in run.printed.getvalue()
    assert run.weights() == uninterrupted
    tell("SIGSTOP of one of two learners, stall_timeout_s=20", "update", "restart; same weights", seconds, run.lost())


def test_a_run_gives_up_after_its_restarts(model_path, tmp_path, tell):
    run = FaultyRun(tmp_path / "run", tiny_config(model_path, num_learners=1, max_restarts=0), ITERATIONS)
    killed: list[float] = []

    def kill(algorithm):
        killed.append(time.monotonic())
        send(LEARNER, signal.SIGKILL)(algorithm)

    with pytest.raises(LearnerError, match="learner 0 died"):
        run.run_with((1, "update", 1, kill))
    assert run.folder.state() == "failed"
    tell("SIGKILL of the learner, max_restarts=0", "update", "typed error", time.monotonic() - killed[0])


STALL_S = 45.0


def test_an_engine_and_an_env_runner_that_hang_are_replaced(model_path, tmp_path, tell):
    run = FaultyRun(tmp_path / "run", tiny_config(model_path, stall_timeout_s=STALL_S), ITERATIONS)
    stop = signal.SIGSTOP
    seconds = run.run_with((1, "sampling", 2, send(ENGINE, stop)), (1, "sampling", 3, send(ENV_RUNNER, stop)))
    printed = run.printed.getvalue()
    print(printed)
    assert len(run.algorithms) == 1
    assert printed.count(f"no progress for {STALL_S:g} s (sampling); ending env runner 1, engine 0, so that") == 2
    assert "restart 1 of" not in printed  # the line on what was replaced quotes Ray
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
ray.init("local", num_cpus=2, object_store_memory=150_000_000, include_dashboard=False, log_to_driver=False)
with registered(CountingEnv):
    FaultyRun(folder, tiny_config(model_path, stall_timeout_s=5.0), 2).run_with()
"""


def test_a_driver_that_hangs_itself_ends_with_its_stacks(model_path, tmp_path, tell):
    """Nothing can be replaced: actors are ended in vain, then the process ends, and its Ray with it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("RAY_ADDRESS", None)
    run, began = tmp_path / "run", tmp_path / "began"
    done = subprocess.run(
        [sys.executable, "-c", HUNG_DRIVER, model_path, str(run), str(began)],
        env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert began.is_file(), done.stderr
    seconds = time.time() - float(began.read_text())
    assert done.returncode == 1, done.stderr
    assert RunFolder.reopen(run).state() == "failed"
    assert "stopping with exit code 1" in (run / "error.log").read_text()
    assert "in hang" in done.stderr
    tell("the driver hangs, stall_timeout_s=5", "iteration", "stacks; exit 1", seconds)
