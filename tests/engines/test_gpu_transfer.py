"""On a CUDA device: vLLM's sleep next to a learner, and weights sent by CUDA IPC and NCCL."""

import asyncio
import contextlib
from functools import partial

import numpy as np
import pytest
import ray
import torch
from architectures import randomise

from trial_ray.engines.client import EngineClient
from trial_ray.engines.pool import EnginePool
from trial_ray.engines.protocol import SamplingParams
from trial_ray.engines.transfer import weight_sender
from trial_ray.errors import EngineError
from trial_ray.models.tensors import engine_tensors

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

GIB = 2**30


@pytest.fixture(scope="module")
def gpu_ray():
    """A Ray session that sees the GPUs."""
    ray.shutdown()
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@contextlib.contextmanager
def started(folder, num_gpus, **engine_kwargs):
    """A pool of one vLLM engine."""
    engine_kwargs |= {"max_model_len": 160, "dtype": "bfloat16", "kv_cache_gib": 4, "enforce_eager": True}
    pool = EnginePool(
        engine="vllm", model_path=str(folder), num_engines=1, engine_kwargs=engine_kwargs, num_gpus_per_engine=num_gpus
    )
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
    return asyncio.run(client.generate(np.arange(10, 40), SamplingParams(8, temperature=0), 0))


def tensors_of(model):
    return partial(engine_tensors, model, torch.bfloat16)


def test_ipc_sends_weights_to_an_engine_that_sleeps_next_to_the_learner(tiny_qwen3, learner):
    """The engine has half of a GPU; this process uses the other half as the learner would."""
    sender, free = weight_sender("ipc", rank=0, workers_per_engine=1), []
    with started(tiny_qwen3, num_gpus=0.5, enable_sleep_mode=True) as pool:
        for version in range(1, 12):
            awake = torch.cuda.mem_get_info()[0]
            pool.sleep(1 + version % 2)
            assert torch.cuda.mem_get_info()[0] - awake > 3.5 * GIB
            with pytest.raises(EngineError, match="asleep"):
                greedy(pool)
            randomise(learner, version)
            pool.wake("weights")
            pool.sync(sender.prepare(tensors_of(learner), version, pool.handles))  # It compares checksums.
            sender.release()
            pool.wake("cache")
            assert greedy(pool).weight_version == version
            torch.cuda.empty_cache()
            free.append(torch.cuda.mem_get_info()[0])
    assert free[1] - free[-1] < 0.1 * GIB, "released copies still occupy memory"


def test_nccl_sends_the_weights_to_another_gpu(tiny_qwen3, learner):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")

    def uuid_of(index):
        return str(torch.cuda.get_device_properties(index).uuid)

    with started(tiny_qwen3, num_gpus=1) as pool:
        sender = weight_sender("nccl", rank=0, workers_per_engine=1)
        # Compare UUIDs: the engine's GPU may be any, and has index 0 in the engine's process.
        used = ray.get(pool.handles[0].__ray_call__.remote(lambda actor: uuid_of(0)), timeout=60)
        own = next(index for index in range(torch.cuda.device_count()) if uuid_of(index) != used)
        model = learner.to(f"cuda:{own}")
        with torch.cuda.device(own):
            for version in (1, 2):
                randomise(model, version)
                pool.sync(sender.prepare(tensors_of(model), version, pool.handles), send=sender.send)
                sender.release()
        assert greedy(pool).weight_version == 2
