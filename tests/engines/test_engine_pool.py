"""Engine pool: weights are confirmed by every engine, and lost engines are replaced with the same weights."""

import asyncio
import contextlib

import numpy as np
import psutil
import pytest
import ray

from trial_ray.engines.client import EngineClient
from trial_ray.engines.pool import EnginePool
from trial_ray.engines.protocol import SamplingParams
from trial_ray.engines.weights import pack_weights
from trial_ray.errors import CannotServeError, EngineError

pytestmark = pytest.mark.actors


@pytest.fixture(scope="module")
def weights(model):
    """Function that packs a version of the weights in the engines' dtype."""
    parameters = [(name, parameter.bfloat16()) for name, parameter in model.named_parameters()]
    return lambda version: pack_weights(parameters, version)


@pytest.fixture(scope="module")
def shared_pool(ray_session, tiny_qwen3):
    pool = EnginePool(
        engine="transformers",
        model_path=str(tiny_qwen3),
        num_engines=2,
        engine_kwargs={"max_model_len": 64, "dtype": "bfloat16", "num_threads": 1},
        num_cpus_per_engine=0.2,
    )
    pids(pool)
    yield pool
    processes = [psutil.Process(pid) for pid in pids(pool)]
    pool.stop()
    assert pool.handles == []
    assert not psutil.wait_procs(processes, timeout=20)[1]


@pytest.fixture
def pool(shared_pool):
    """Two live engines, whatever an earlier test did to them."""
    shared_pool.probe_and_restart()
    return shared_pool


def pids(pool):
    return [info["pid"] for info in pool.start(timeout_s=200)]


def generate(handles, count=1):
    client, request = EngineClient(handles, timeout_s=60), (np.arange(10, 30), SamplingParams(3, seed=1))

    async def main():
        return await asyncio.gather(*[client.generate(*request, group) for group in range(count)])

    return [(response.response_ids.tolist(), response.weight_version) for response in asyncio.run(main())]


def versions(pool):
    return ray.get([handle.weight_version.remote() for handle in pool.handles], timeout=60)


def in_actor(handle, function):
    return ray.get(handle.__ray_call__.remote(function), timeout=60)


def test_an_engine_that_cannot_serve_is_replaced_by_the_next_sync(pool, weights):
    survivor, lost = pool.handles
    in_actor(lost, lambda engine: setattr(engine, "_failure", "a step raised"))
    pool.sleep(2)

    def call_until_dead():
        while True:
            with contextlib.suppress(CannotServeError):
                return ray.get(lost.weight_version.remote(), timeout=60)

    with pytest.raises(ray.exceptions.RayActorError):
        call_until_dead()
    assert pool.wake("weights"), "an engine was lost"
    resent = []
    pool.sync(weights(7), resend=lambda: resent.append(1) or weights(7))
    pool.wake("cache")
    assert resent == [1]
    assert (pool.handles[0], versions(pool)) == (survivor, [7, 7])
    assert pool.handles[1] != lost


@pytest.mark.faults
def test_a_failed_replacement_is_restored_by_the_next_call(pool, weights, monkeypatch):
    pool.sync(weights(12))
    assert pool.probe_and_restart() == []
    before = generate(pool.handles[1:])
    lost = psutil.Process(pids(pool)[1])
    lost.kill()
    lost.wait(timeout=20)
    with monkeypatch.context() as failing:
        failing.setattr("trial_ray.engines.pool.LOAD_TIMEOUT_S", 0.0)
        with pytest.raises(EngineError):
            pool.probe_and_restart()
    assert len(pool.handles) == 1
    pool.restore()
    assert versions(pool) == [12, 12]
    assert generate(pool.handles[1:]) == before
    in_actor(pool.handles[0], lambda engine: setattr(engine._lock, "version", -1))
    assert pool.probe_and_restart() == [0], "an engine without weights was kept"
    assert versions(pool) == [12, 12]


def test_sleeping_engines_reject_requests_until_they_have_weights_again(pool, weights):
    shards = weights(11)
    pool.sync(shards)
    before = generate(pool.handles, 4)
    for level in (1, 2):
        pool.sleep(level=level)
        assert versions(pool) == [11 if level == 1 else -1] * 2
        with pytest.raises(EngineError, match="weights are asleep"):
            pool.sync(shards)
        for part in ("weights", "cache"):
            with pytest.raises(EngineError, match="is asleep"):
                generate(pool.handles)
            assert not pool.wake(part)
        with pytest.raises(EngineError, match="has no weights"):
            generate(pool.handles)
        pool.sync(shards)
        assert generate(pool.handles, 4) == before
