"""What engines are told: dtypes by device in one place, and arguments refused before any actor starts."""

from __future__ import annotations

from importlib import metadata
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen3Config

from trial_ray.algorithms import GRPOConfig
from trial_ray.engines.pool import EnginePool
from trial_ray.engines.requirements import require_engine
from trial_ray.engines.settings import check_positions, engine_dtype
from trial_ray.engines.transformers import TransformersEngine
from trial_ray.engines.vllm import VLLMEngine
from trial_ray.errors import ConfigError
from trial_ray.models.model_shape import max_positions
from trial_ray.models.module import compute_dtype

VLLM = pytest.mark.vllm


def create(engine, **engine_kwargs):
    """Refused arguments are told before Ray is asked for anything: no test here starts it."""
    EnginePool(engine=engine, model_path="folder", num_engines=1, engine_kwargs={"max_model_len": 64, **engine_kwargs})


@pytest.mark.parametrize(
    ("engine", "arguments", "message"),
    [
        ("transformers", {"max_batches": 8}, "transformers engine has no argument 'max_batches'.*'max_batch'"),
        ("transformers", {"dtype": "bf16"}, "expected dtype as one of float32, bfloat16, float16, got 'bf16'"),
        ("transformers", {"max_batch": 0}, "expected max_batch as a whole number of at least 1, got 0"),
        pytest.param("vllm", {"tensor_parallel_size": 2}, "is 2, but an engine has 0 GPUs; set num_gpus", marks=VLLM),
        pytest.param("vllm", {"enable_sleep_mode": True}, "sleep mode needs CUDA", marks=VLLM),
        pytest.param("vllm", {"seed": "7"}, "expected seed as a whole number or None, got '7'", marks=VLLM),
        pytest.param("vllm", {"log_level": "LOUD"}, "expected log_level as one of DEBUG, INFO.*got 'LOUD'", marks=VLLM),
        pytest.param("vllm", {"logprobs_mode": "raw_logprobs"}, "'logprobs_mode' cannot be set: .*sampled", marks=VLLM),
        pytest.param("vllm", {"quantization": "fp8"}, "'quantization' cannot be set: .*checksum", marks=VLLM),
        pytest.param(
            "vllm", {"max_num_seqs": 8, "max_batch": 8}, "'max_num_seqs' and 'max_batch' set the same", marks=VLLM
        ),
    ],
)
def test_arguments_that_an_engine_does_not_take_are_refused_with_what_it_takes(engine, arguments, message):
    with pytest.raises(ConfigError, match=message):
        create(engine, **arguments)


@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=VLLM)])
def test_contexts_longer_than_the_models_positions_are_refused_before_any_actor_starts(engine, tiny_qwen3):
    with pytest.raises(ConfigError, match=r"max_model_len is 513, .* has 512 positions. Lower max_prompt_tokens"):
        EnginePool(engine=engine, model_path=str(tiny_qwen3), num_engines=1, engine_kwargs={"max_model_len": 513})
    with pytest.raises(ConfigError, match="has 512 positions"):
        TransformersEngine(str(tiny_qwen3), max_model_len=513)._open()
    check_positions(str(tiny_qwen3), 512)
    check_positions("a folder of another node", 513)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 1000),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}, 4000),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.5}}, 2500),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 250}},
            1000,
        ),
    ],
)  # fmt: skip
def test_scaled_rotary_embeddings_have_the_positions_that_vllm_gives_them(settings, expected):
    assert max_positions(Qwen3Config(max_position_embeddings=1000, **settings)) == expected


@VLLM
def test_a_cache_of_given_size_needs_no_share_of_the_gpu_to_be_free(monkeypatch):
    """vLLM 0.32 refuses to start where ``gpu_memory_utilization`` of the device is not free, also with such a cache."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    shared = VLLMEngine("nowhere", max_model_len=64, kv_cache_gib=2.0)._arguments
    alone = VLLMEngine("nowhere", max_model_len=16_384)._arguments
    assert (shared["kv_cache_memory_bytes"], shared["gpu_memory_utilization"]) == (2 << 30, 0.01)
    assert (alone["kv_cache_memory_bytes"], alone["gpu_memory_utilization"]) == (None, 0.9)
    assert (shared["max_num_batched_tokens"], alone["max_num_batched_tokens"]) == (8192, 16_384)


def test_vllm_for_gpus_is_refused_without_one(monkeypatch):
    """Ray 2.60 shows every GPU to actors that asked for none: the engine would take one unseen."""
    require_engine("vllm", 0)
    monkeypatch.setattr(metadata, "distributions", lambda name: [SimpleNamespace(version="0.32.0")])
    with pytest.raises(ConfigError, match=r"num_gpus_per_engine is 0.*Set \.engines\(num_gpus_per_engine=1\)"):
        require_engine("vllm", 0)
    require_engine("vllm", 0.5)


@pytest.mark.parametrize(
    ("gpus", "engine_kwargs", "expected"),
    [
        (0, {}, "float32"),
        (1, {}, "bfloat16"),
        (1, {"dtype": "float32"}, "float32"),
        (0, {"dtype": "bfloat16"}, "bfloat16"),
    ],
)
def test_engines_with_a_gpu_compute_in_bfloat16_unless_told_otherwise(gpus, engine_kwargs, expected):
    config = GRPOConfig().engines(num_gpus_per_engine=gpus, engine_kwargs=engine_kwargs)
    assert config.engine_dtype() == expected
    assert engine_dtype(engine_kwargs.get("dtype"), on_gpu=gpus > 0) == expected


@pytest.mark.parametrize(
    ("setting", "device", "expected"),
    [(None, "cpu", None), (None, "cuda", "bfloat16"), ("float32", "cuda", None), ("float16", "cuda", "float16")],
)
def test_learners_compute_in_bfloat16_on_a_gpu_unless_told_otherwise(setting, device, expected):
    assert compute_dtype(setting, device) is (expected and getattr(torch, expected))
