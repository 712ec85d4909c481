"""Actors that are killed, hang, or never get what they ask for: training goes on in time, or says why it cannot."""

from __future__ import annotations

import os
import signal
import time

import fault_table
import psutil
import pytest
import ray
from faulty_env import CountingEnv
from faulty_run import tiny_config
from user_env import registered

from trial_ray.algorithms.config import GRPOConfig
from trial_ray.engines.fault_log import FAULTS

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("ray_session"), pytest.mark.timeout(600)]
GROUPS, ROLLOUTS, TURNS = 2, 4, 3
SAMPLE_TIMEOUT_S = 30.0


@pytest.fixture(scope="module", autouse=True)
def environment(ray_session):
    with registered(CountingEnv):
        yield


def config_of(model_path: str) -> GRPOConfig:
    return (
        tiny_config(model_path)
        .env_runners(max_group_redraws=2)
        .env_runners(sample_timeout_s=SAMPLE_TIMEOUT_S)
        .evaluation(evaluation_split="train", evaluation_num_tasks=2)
    )


@pytest.fixture(scope="module")
def algo(environment, model_path):
    algo = config_of(model_path).build_algo()
    yield algo
    algo.stop()


@pytest.fixture(scope="module")
def vllm_algo(environment, model_path):
    algo = config_of(model_path).engines(engine="vllm").build_algo()
    train_all(algo)
    yield algo
    algo.stop()


def runner_pid(algo) -> int:
    [pid] = algo.env_runner_group.foreach_env_runner(lambda runner: os.getpid(), local_env_runner=False)
    return pid


def train_all(algo, replaced: str = "") -> tuple[float, int]:
    """One iteration, in which every rollout is trained on once, under one version; returns its seconds and its lost rows.

    Its result says what was replaced, and nothing where nothing was.
    """
    began = time.monotonic()
    result = algo.train()
    seconds = time.monotonic() - began
    assert replaced in result.get(FAULTS, "")
    assert bool(replaced) == (FAULTS in result)
    assert result["groups"]["num_trained"] == GROUPS
    assert result["groups"]["num_dropped"] == 0
    assert result["rows"]["given_to_learners"] == GROUPS * ROLLOUTS * TURNS
    rows = result["learners"]["default_policy"]["rows"]
    assert rows["skipped"] == rows["lost_groups"] == 0
    versions = ray.get([engine.weight_version.remote() for engine in algo.engine_pool.handles], timeout=30)
    assert versions == [algo.weight_version]
    return seconds, fault_table.lost_rows(result)


def test_the_only_env_runner_is_killed(algo, tell):
    train_all(algo)
    before = runner_pid(algo)
    os.kill(before, signal.SIGKILL)
    disturbed = train_all(algo, "replaced: env runner 1 died: ")
    assert runner_pid(algo) != before
    tell("SIGKILL of the only env runner", "before sampling", "restarted; goes on", *disturbed)


def test_the_only_engine_is_killed_between_sampling_and_sync(algo, tell):
    [engine] = algo.engine_pool.start()
    began = time.monotonic()
    os.kill(engine["pid"], signal.SIGKILL)
    algo._sync_weights()  # as at the end of an iteration: the engine is replaced here, and nobody draws again
    seconds = time.monotonic() - began
    _, lost = train_all(algo, "replaced: engine 0 died before it could load weights")
    assert algo.engine_pool.replacements == 1
    tell("SIGKILL of the only engine", "before the weights are sent", "replaced; goes on", seconds, lost)


def test_the_only_env_runner_hangs(algo, tell):
    hung = runner_pid(algo)
    os.kill(hung, signal.SIGSTOP)
    try:
        seconds, lost = train_all(algo, "replaced: env runner 1 ended no group within sample_timeout_s=30 s")
    finally:
        with pytest.raises(ProcessLookupError):  # ended, and not left behind
            os.kill(hung, signal.SIGCONT)
    assert runner_pid(algo) != hung
    tell(
        f"SIGSTOP of the only env runner, sample_timeout_s={SAMPLE_TIMEOUT_S:g}",
        "before sampling",
        "replaced; goes on",
        seconds,
        lost,
    )


@pytest.mark.vllm
def test_the_only_vllm_engine_is_killed_before_sampling(vllm_algo, tell):
    before = vllm_algo.engine_pool.replacements
    [engine] = vllm_algo.engine_pool.start()
    actor = psutil.Process(engine["pid"])
    processes = [actor, *actor.children(recursive=True)]
    actor.kill()
    disturbed = train_all(vllm_algo, "replaced: engine 0 does not answer")
    assert vllm_algo.engine_pool.replacements == before + 1
    assert not psutil.wait_procs(processes, timeout=30)[1]
    tell("SIGKILL of the only vLLM engine", "before sampling", "replaced; goes on", *disturbed)
