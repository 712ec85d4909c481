"""Fields of vLLM's own arguments reach the engine inside the actor."""

from __future__ import annotations

import asyncio

import pytest
import ray

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

    config = asyncio.run(started())._engine.vllm_config
    return {
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "num_gpu_blocks": config.cache_config.num_gpu_blocks,
        "logprobs_mode": config.model_config.logprobs_mode,
        "dtype": str(config.model_config.dtype),
    }


def test_further_arguments_arrive_and_go_before_the_engines_own(ray_session, tiny_qwen3):
    assert ray.get(settings_inside.remote(str(tiny_qwen3)), timeout=550) == {
        "max_num_batched_tokens": 4096,
        "max_num_seqs": 5,
        "num_gpu_blocks": 40,
        "logprobs_mode": "processed_logprobs",
        "dtype": "torch.float32",
    }
