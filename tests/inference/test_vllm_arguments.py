"""Fields of vLLM's own arguments reach the engine inside the actor."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import ray

from trial_ray.errors import ConfigError

pytestmark = [pytest.mark.actors, pytest.mark.vllm, pytest.mark.timeout(600)]


@ray.remote(num_cpus=0.2)
def settings_inside(folder: str) -> dict[str, object]:
    from trial_ray.inference.vllm_engine import VLLMEngine

    async def started() -> VLLMEngine:
        engine = VLLMEngine(
            folder,
            max_model_len=64,
            num_threads=1,
            max_num_batched_tokens=4096,
            max_num_seqs=5,
            num_gpu_blocks_override=40,
        )
        await engine.ready()
        return engine

    async def slept(engine: VLLMEngine) -> list[bool]:
        """Whether vLLM sleeps after each step; its CPU worker keeps the memory, the rest of it does as on a GPU."""
        engine._arguments["enable_sleep_mode"] = True
        found = []
        for step in (engine.sleep(), engine.wake("weights"), engine.wake("cache")):
            await step
            found.append(engine._engine.is_sleeping())
        return found

    async def settings() -> tuple[Any, list[bool]]:
        engine = await started()
        with pytest.raises(ConfigError, match="cannot sleep"):
            await engine.sleep()
        return engine._engine.vllm_config, await slept(engine)

    config, sleeping = asyncio.run(settings())
    import torch._dynamo

    return {
        "compiles": not torch._dynamo.config.disable,
        "sleeping": sleeping,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "num_gpu_blocks": config.cache_config.num_gpu_blocks,
        "logprobs_mode": config.model_config.logprobs_mode,
        "dtype": str(config.model_config.dtype),
    }


def test_further_arguments_arrive_and_go_before_the_engines_own(ray_session, tiny_qwen3):
    assert ray.get(settings_inside.remote(str(tiny_qwen3)), timeout=550) == {
        "compiles": False,  # eager execution is the default on a CPU, and vLLM's sampler would be compiled all the same
        "sleeping": [True, True, False],
        "max_num_batched_tokens": 4096,
        "max_num_seqs": 5,
        "num_gpu_blocks": 40,
        "logprobs_mode": "processed_logprobs",
        "dtype": "torch.float32",
    }
