"""Actors that are killed or hang in a running algorithm: training goes on in time, and every sampled row is trained or counted.

Each kind of actor is killed in each phase of an iteration. A learner that is lost ends the algorithm with an error of a type after
which a run restarts from its newest checkpoint; tests/faults/test_hangs.py kills learners of a run.
"""

import os
import signal
import time
from contextlib import contextmanager, suppress
from functools import partial

import pytest
import ray
from fault_checks import lost_rows
from faulty_env import CountingEnv
from faulty_run import pid, tiny_config
from ray.exceptions import RayError
from user_env import registered

from trial_ray.algorithms.actors import ENGINE, ENV_RUNNER, LEARNER
from trial_ray.engines.pool import FAULTS
from trial_ray.errors import UnsupportedError
from trial_ray.runs.metrics_file import flatten

pytestmark = pytest.mark.timeout(600)
RESTART_S = 120.0
PHASES = ("sampling", "scoring", "update", "sync", "checkpoint", "evaluation", "between iterations")


@pytest.fixture(scope="module")
def algo(ray_session, model_path):
    """Groups are sampled one version ahead; ``tests/e2e/test_training.py`` kills actors that sample between updates."""
    config = tiny_config(model_path, num_learners=1).training(importance_cap=2.0)
    config.env_runners(sample_timeout_s=30.0, max_staleness=1)
    config.evaluation(evaluation_split="train", evaluation_num_tasks=4, evaluation_interval=1)
    with registered(CountingEnv):
        algo = config.build_algo()
        yield algo
        algo.stop()


def train_all(algo, fewest=4):
    """One iteration, in which every rollout is trained on once, under weights that are recent enough; returns its faults.

    At least ``fewest`` of the 4 rollouts of each of the 2 groups are completed, with 3 turns each.
    """
    result = algo.train()
    metrics = flatten(result)
    assert metrics["groups/num_trained"] == 2
    assert metrics["groups/num_dropped"] == 0
    assert metrics["rows/given_to_learners"] in range(2 * fewest * 3, 2 * 4 * 3 + 1, 3)
    assert lost_rows(metrics) == 0
    versions = ray.get([engine.weight_version.remote() for engine in algo.engine_pool.handles], timeout=30)
    assert versions == [algo.weight_version]
    assert metrics["evaluation/env_runners/num_episodes"] == 4
    return result.get(FAULTS, "")


def kill(algo, kind):
    """Kill the actor; an env runner is back before this returns, as after a long phase."""
    [actor], killed = [each for each in algo.actors() if each.kind == kind], pid(algo, kind)
    os.kill(killed, signal.SIGKILL)
    while kind == ENV_RUNNER:
        with suppress(RayError):
            if ray.get(actor.handle.report.remote(), timeout=RESTART_S) and pid(algo, kind) != killed:
                return
        time.sleep(0.05)


@contextmanager
def before(target, method, act):
    """Do something once, before the next call of a method."""
    original = getattr(target, method)

    def call(*args, **kwargs):
        delattr(target, method)
        act()
        return original(*args, **kwargs)

    setattr(target, method, call)
    yield
    assert method not in vars(target), "the phase never came"


@pytest.mark.parametrize("kind", [ENV_RUNNER, ENGINE])
@pytest.mark.parametrize("phase", PHASES)
def test_training_goes_on_without_a_killed_actor(algo, kind, phase, tmp_path):
    act = partial(kill, algo, kind)
    where = {
        "scoring": (algo.learner_group, "update"),
        "update": (algo.sampler, "note_effective_sample_size"),
        "sync": (algo.workers, "adapt"),
    }
    faults = ""
    # Rollouts whose request is in flight on a killed engine fail; a group is trained on if 2 are completed.
    train = partial(train_all, algo, 2 if kind == ENGINE else 4)
    if phase == "checkpoint":
        with before(algo, "get_state", act):
            algo.save_to_path(tmp_path)
    elif phase == "between iterations":
        act()
    elif phase == "evaluation":
        with before(algo.workers, "wait", act):
            algo.evaluate()
        faults = algo.take_faults()
    else:
        with before(*where.get(phase, (algo.workers, "wait")), act):
            faults = train()
    assert kind.rstrip("s") in faults + train()


def test_the_only_env_runner_hangs(algo):
    hung = pid(algo, ENV_RUNNER)
    os.kill(hung, signal.SIGSTOP)
    assert "env runner 1 completed no group within sample_timeout_s=30 s" in train_all(algo)
    with pytest.raises(ProcessLookupError):  # ended, and not left behind
        os.kill(hung, signal.SIGCONT)


def test_stop_ends_actors_that_hang(algo):
    """The file's processes are gone afterwards: see ``conftest.py``."""
    for kind in (ENV_RUNNER, ENGINE, LEARNER):
        os.kill(pid(algo, kind), signal.SIGSTOP)
    algo.stop()
    for call in (algo.train, algo.evaluate, algo.evaluate_sets):
        with pytest.raises(UnsupportedError):
            call()
