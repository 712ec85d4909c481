"""Actors that are killed or hang in a running algorithm: training goes on in time; tests/e2e/test_training.py kills both kinds."""

from __future__ import annotations

import os
import signal

import pytest
import ray
from fault_checks import lost_rows
from faulty_env import CountingEnv
from faulty_run import pid, tiny_config
from user_env import registered

from trial_ray.algorithms.actors import ENGINE, ENV_RUNNER, LEARNER
from trial_ray.engines.fault_log import FAULTS

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("ray_session"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def algo(ray_session, model_path):
    with registered(CountingEnv):
        config = tiny_config(model_path, num_learners=1).env_runners(max_group_redraws=2, sample_timeout_s=30.0)
        algo = config.build_algo()
        yield algo
        algo.stop()


def train_all(algo, replaced: str) -> None:
    """One iteration, in which every rollout is trained on once, under one version; its result says what was replaced."""
    result = algo.train()
    assert replaced in result[FAULTS]
    assert (result["groups"]["num_trained"], result["groups"]["num_dropped"]) == (2, 0)
    assert result["rows"]["given_to_learners"] == 2 * 4 * 3
    assert lost_rows(result) == 0
    versions = ray.get([engine.weight_version.remote() for engine in algo.engine_pool.handles], timeout=30)
    assert versions == [algo.weight_version]


def test_the_only_engine_is_killed_between_sampling_and_sync(algo):
    os.kill(pid(algo, ENGINE), signal.SIGKILL)
    algo._sync_weights()  # as at the end of an iteration: the engine is replaced here, and nobody draws again
    train_all(algo, "replaced: engine 0 died before it could load weights (")  # and nothing more


def test_the_only_env_runner_hangs(algo):
    hung = pid(algo, ENV_RUNNER)
    os.kill(hung, signal.SIGSTOP)
    train_all(algo, "replaced: env runner 1 completed no group within sample_timeout_s=30 s")
    with pytest.raises(ProcessLookupError):  # ended, and not left behind
        os.kill(hung, signal.SIGCONT)


def test_stop_ends_actors_that_hang(algo):
    """The file's processes are gone afterwards: see ``conftest.py``."""
    for kind in (ENV_RUNNER, ENGINE, LEARNER):
        os.kill(pid(algo, kind), signal.SIGSTOP)
    algo.stop()
