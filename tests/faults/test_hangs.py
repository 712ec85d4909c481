"""A run replaces killed learners and hanging processes automatically, and ends with the same weights."""

import os
import signal
import sys

import pytest
from commands import run_python
from faulty_env import CountingEnv
from faulty_run import ENDING, STALL_S, FaultyRun, hang, kill, pid, tiny_config
from user_env import registered

from trial_ray import GRPO
from trial_ray.algorithms.actors import ENGINE, LEARNER
from trial_ray.runs.folder import RunFolder

pytestmark = pytest.mark.usefixtures("ray_session")


PHASES = {"_sync_weights": 1, "save_to_path": 2, "evaluate": 3}
"""Iteration at which the learner is killed when each of these methods of the algorithm is called."""


@registered(CountingEnv)
def test_lost_learners_restart_the_run_with_the_same_weights(model_path, tmp_path, monkeypatch):
    def evaluated(**settings):
        config = tiny_config(model_path, num_learners=1, **settings)
        return config.evaluation(evaluation_split="train", evaluation_num_tasks=2, evaluation_interval=1)

    whole = FaultyRun(tmp_path / "whole", evaluated())
    whole.run_with()
    left, restarts = dict(PHASES), 2 + len(PHASES)

    def killing(method, original):
        def call(self, *args, **kwargs):
            if self.weight_version and self.iteration >= left.get(method, 100) - 1:
                del left[method]
                os.kill(pid(self, LEARNER), signal.SIGKILL)
            return original(self, *args, **kwargs)

        return call

    for method in PHASES:
        monkeypatch.setattr(GRPO, method, killing(method, getattr(GRPO, method)))
    run = FaultyRun(tmp_path / "run", evaluated(max_restarts=restarts))
    printed = run.run_with((1, "sampling", 1, kill(LEARNER)), (2, "update", 1, hang(LEARNER)))
    assert not left
    assert len(run.algorithms) == 1 + restarts
    assert f"{ENDING} {STALL_S:g} s (update); ending " in printed
    assert "ActorDiedError" in (run.folder.path / "logs/restart-1.log").read_text()
    assert run.weights() == whole.weights()


@registered(CountingEnv)
def test_an_engine_that_hangs_is_replaced(model_path, tmp_path):
    run = FaultyRun(tmp_path / "run", tiny_config(model_path))
    printed = run.run_with((1, "sampling", 2, hang(ENGINE)))
    assert len(run.algorithms) == 1
    assert f"{ENDING} {STALL_S:g} s (sampling); ending env runner 1, engine 0, so that" in printed
    assert "restart 1 of" not in printed  # the engine was replaced without a restart of the run


HUNG_DRIVER = """
import sys, time
from pathlib import Path
import ray
from faulty_env import CountingEnv
from faulty_run import FaultyRun, tiny_config
from user_env import registered
from trial_ray.algorithms import GRPO
from trial_ray.ray_internals import local_start

def hang(*arguments, **named):
    while True:
        time.sleep(1)

GRPO.training_step, model_path, folder = hang, sys.argv[1], Path(sys.argv[2])
with local_start():
    ray.init("local", num_cpus=2, object_store_memory=150_000_000, include_dashboard=False, log_to_driver=False)
with registered(CountingEnv):
    FaultyRun(folder, tiny_config(model_path, stall_timeout_s=5.0)).run_with()
"""


def test_a_hanging_driver_ends_with_its_stacks(model_path, tmp_path):
    """Killing actors does not help, therefore the process and its Ray end."""
    run = tmp_path / "run"
    done = run_python(HUNG_DRIVER, model_path, run, PYTHONPATH=os.pathsep.join(sys.path))
    assert done.returncode == 1, done.stderr
    assert RunFolder(run).state() == "failed"
    assert "stopping with exit code 1" in (run / "error.log").read_text()
    assert "in hang" in done.stderr
