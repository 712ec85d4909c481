"""Settings of engines: dtypes by device, and arguments that are rejected before any actor starts."""

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


def create(engine, folder="folder", **engine_kwargs):
    """Create a pool; no test here starts Ray, so the arguments must be rejected before."""
    EnginePool(engine=engine, model_path=folder, num_engines=1, engine_kwargs={"max_model_len": 64, **engine_kwargs})


@pytest.mark.parametrize(
    ("engine", "arguments", "message"),
    [
        ("transformers", {"max_batches": 8}, "'max_batches'.*'max_batch'"),
        ("transformers", {"unlike_any": 8}, "device, dtype, max_batch, max_model_len, num_threads"),
        ("transformers", {"dtype": "bf16"}, "'bf16'"),
        ("transformers", {"max_batch": 0}, "max_batch.*got 0"),
        ("transformers", {"max_model_len": None}, "max_model_len.*got None"),
        pytest.param("vllm", {"tensor_parallel_size": 2}, "num_gpus_per_engine=2", marks=VLLM),
        pytest.param("vllm", {"enable_sleep_mode": True}, "sleep mode needs CUDA", marks=VLLM),
        pytest.param("vllm", {"batch_invariant": True}, "batch_invariant=True", marks=VLLM),
        pytest.param("vllm", {"enable_chunked_prefill": True}, "enable_chunked_prefill=False", marks=VLLM),
        pytest.param("vllm", {"seed": "7"}, "seed.*'7'", marks=VLLM),
        pytest.param("vllm", {"log_level": "LOUD"}, "log_level.*'LOUD'", marks=VLLM),
        pytest.param("vllm", {"logprobs_mode": "raw_logprobs"}, "'logprobs_mode' cannot be set", marks=VLLM),
        pytest.param("vllm", {"quantization": "fp8"}, "'quantization' cannot be set", marks=VLLM),
        pytest.param("vllm", {"max_num_seqs": 8, "max_batch": 8}, "'max_num_seqs' and 'max_batch'", marks=VLLM),
    ],
)
def test_invalid_arguments_of_an_engine_are_rejected(engine, arguments, message):
    with pytest.raises(ConfigError, match=message):
        create(engine, **arguments)


@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=VLLM)])
def test_contexts_longer_than_the_models_positions_are_rejected(engine, tiny_qwen3):
    with pytest.raises(ConfigError, match="has 512 positions"):
        create(engine, str(tiny_qwen3), max_model_len=513)
    with pytest.raises(ConfigError):
        TransformersEngine(str(tiny_qwen3), max_model_len=513)._open()
    check_positions(str(tiny_qwen3), 512)
    check_positions("a folder of another node", 513)


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "default"}, 1000),
        ({"rope_type": "linear", "factor": 4.0}, 4000),
        ({"rope_type": "dynamic", "factor": 2.5}, 2500),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 250}, 1000),
    ],
)
def test_scaled_rotary_embeddings_have_the_positions_of_vllm(rope, expected):
    config = Qwen3Config(max_position_embeddings=1000, rope_parameters={"rope_theta": 1e4, **rope})
    assert max_positions(config) == expected


@VLLM
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"max_model_len": 64, "kv_cache_gib": 2.0}, (2 << 30, 0.01, 8192)),
        ({"max_model_len": 16_384}, (None, 0.9, 16_384)),
    ],
)
def test_a_cache_of_given_size_needs_no_free_share_of_the_gpu(monkeypatch, arguments, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    made = VLLMEngine("nowhere", **arguments)._arguments
    names = ("kv_cache_memory_bytes", "gpu_memory_utilization", "max_num_batched_tokens")
    assert tuple(made[name] for name in names) == expected


def test_vllm_for_gpus_is_rejected_without_a_gpu(monkeypatch):
    require_engine("vllm", 0)
    monkeypatch.setattr(metadata, "distributions", lambda name: [SimpleNamespace(version="0.32.0")])
    with pytest.raises(ConfigError):
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
def test_engines_on_a_gpu_compute_in_bfloat16_by_default(gpus, engine_kwargs, expected):
    config = GRPOConfig().engines(num_gpus_per_engine=gpus, engine_kwargs=engine_kwargs)
    assert config.engine_dtype() == expected
    assert engine_dtype(engine_kwargs.get("dtype"), on_gpu=gpus > 0) == expected


@pytest.mark.parametrize(
    ("setting", "device", "expected"),
    [
        (None, "cpu", None),
        (None, "cuda", torch.bfloat16),
        ("float32", "cuda", None),
        ("float16", "cuda", torch.float16),
    ],
)
def test_learners_on_a_gpu_compute_in_bfloat16_by_default(setting, device, expected):
    assert compute_dtype(setting, device) is expected
