"""On a CUDA device: vLLM's sleep beside a learner's memory, and weights by CUDA IPC and NCCL, confirmed by checksum."""

from __future__ import annotations

import asyncio
from functools import partial

import numpy as np
import pytest
import ray
import torch

from trial_ray.engines.client import EngineClient
from trial_ray.engines.pool import EnginePool
from trial_ray.engines.protocol import SamplingParams
from trial_ray.engines.transfer import weight_sender
from trial_ray.engines.weights import pack_weights
from trial_ray.errors import EngineError
from trial_ray.models.tensors import engine_tensors

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

GIB = 2**30


@pytest.fixture(scope="module")
def gpu_ray(tmp_path_factory):
    """A Ray of its own, which sees the GPUs."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    ray.shutdown()
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def pool(gpu_ray, tiny_qwen3):
    """One vLLM engine on half of a GPU, the other half being this process's, which stands for the learner."""
    pool = EnginePool(
        engine="vllm",
        model_path=str(tiny_qwen3),
        num_engines=1,
        engine_kwargs={
            "max_model_len": 160, "dtype": "bfloat16", "kv_cache_gib": 4, "enable_sleep_mode": True, "enforce_eager": True,
        },
        num_gpus_per_engine=0.5,
    )  # fmt: skip
    try:
        pool.start(timeout_s=600)
        yield pool
    finally:
        pool.stop()


@pytest.fixture(scope="module")
def learner(gpu_ray, tiny_qwen3):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.float32).to("cuda")


def greedy(pool):
    client = EngineClient(pool.handles, timeout_s=120)
    params = SamplingParams(max_tokens=8, temperature=0)
    return asyncio.run(client.generate(np.arange(10, 40, dtype=np.int32), params, 0))


def changed(model, seed):
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_engine_frees_its_memory_and_wakes_with_the_weights_it_is_sent(pool, learner, level):
    shards = pack_weights(engine_tensors(learner, torch.bfloat16), level)
    pool.sync(shards)
    before = greedy(pool)
    free = torch.cuda.mem_get_info()[0]
    pool.sleep(level)
    assert torch.cuda.mem_get_info()[0] - free > 3.5 * GIB
    with pytest.raises(EngineError, match="asleep"):
        greedy(pool)
    pool.wake("weights")
    pool.sync(shards)
    pool.wake("cache")
    assert greedy(pool).response_ids.tolist() == before.response_ids.tolist()


def test_ipc_brings_the_very_weights_that_the_object_store_brings(pool, learner):
    changed(learner, 1)
    pool.sync(pack_weights(engine_tensors(learner, torch.bfloat16), 10))
    through_store = greedy(pool)
    changed(learner, 2)
    pool.sync(pack_weights(engine_tensors(learner, torch.bfloat16), 11))
    changed(learner, 2)
    other = greedy(pool)
    sender = weight_sender("ipc", rank=0, workers_per_engine=1)
    for version in (12, 13):
        pool.sleep(2)
        pool.wake("weights")
        pool.sync(
            sender.prepare(partial(engine_tensors, learner, torch.bfloat16), version, pool.handles)
        )  # compares checksums
        sender.release()
        pool.wake("cache")
        assert greedy(pool).weight_version == version
    found = greedy(pool).response_ids.tolist()
    assert found != other.response_ids.tolist() or found == through_store.response_ids.tolist()
    free = torch.cuda.mem_get_info()[0]
    for version in range(14, 24):
        pool.sync(sender.prepare(partial(engine_tensors, learner, torch.bfloat16), version, pool.handles))
        sender.release()
    torch.cuda.empty_cache()
    assert free - torch.cuda.mem_get_info()[0] < 0.1 * GIB, "offers that were withdrawn still hold memory"


def test_nccl_brings_the_weights_to_an_engine_on_another_gpu(gpu_ray, tiny_qwen3, learner):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    pool = EnginePool(
        engine="vllm",
        model_path=str(tiny_qwen3),
        num_engines=1,
        engine_kwargs={"max_model_len": 160, "dtype": "bfloat16", "kv_cache_gib": 4, "enforce_eager": True},
        num_gpus_per_engine=1,
    )
    try:
        pool.start(timeout_s=600)
        sender = weight_sender("nccl", rank=0, workers_per_engine=1)

        # By UUID: Ray gives the engine any device that is whole, and it is number 0 in the engine's process.
        def uuid_of(index):
            return str(torch.cuda.get_device_properties(index).uuid)

        taken = ray.get(pool.handles[0].__ray_call__.remote(lambda actor: uuid_of(0)), timeout=60)
        own = next(index for index in range(torch.cuda.device_count()) if uuid_of(index) != taken)
        model = learner.to(f"cuda:{own}")
        with torch.cuda.device(own):
            for version in (1, 2):
                changed(model, version)
                weights = sender.prepare(partial(engine_tensors, model, torch.bfloat16), version, pool.handles)
                pool.sync(weights, send=sender.send)
                sender.release()
        assert greedy(pool).weight_version == 2
    finally:
        pool.stop()
