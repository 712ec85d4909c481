"""What engines are told: dtypes by device in one place, and arguments refused before any actor starts."""

from __future__ import annotations

import pytest
import torch

from trial_ray.algorithms import GRPOConfig
from trial_ray.errors import ConfigError
from trial_ray.inference.engine_arguments import engine_dtype
from trial_ray.inference.pool import EnginePool
from trial_ray.models.causal_lm_module import compute_dtype

VLLM = pytest.mark.vllm


def create(engine, **engine_kwargs):
    """Refused arguments are told before Ray is asked for anything: no test here starts it."""
    EnginePool.create(
        engine=engine, model_path="folder", num_engines=1, engine_kwargs={"max_model_len": 64, **engine_kwargs}
    )


@pytest.mark.parametrize(
    ("engine", "arguments", "message"),
    [
        ("transformers", {"max_batches": 8}, "transformers engine has no argument 'max_batches'.*'max_batch'"),
        ("transformers", {"tensor_parallel_size": 2}, "transformers engine has no argument 'tensor_parallel_size'"),
        ("transformers", {"model": "other"}, "transformers engine has no argument 'model'"),
        ("transformers", {"dtype": "bf16"}, "dtype='bf16' found, one of float32, bfloat16, float16"),
        pytest.param(
            "vllm", {"max_num_seq": 8}, "vllm engine has no argument 'max_num_seq'.*'max_num_seqs'", marks=VLLM
        ),
        pytest.param("vllm", {"dtype": "auto"}, "dtype='auto' found", marks=VLLM),
        pytest.param("vllm", {"logprobs_mode": "raw_logprobs"}, "'logprobs_mode' cannot be set: .*sampled", marks=VLLM),
        pytest.param("vllm", {"generation_config": "auto"}, "'generation_config' cannot be set: .*distri", marks=VLLM),
        pytest.param("vllm", {"skip_tokenizer_init": False}, "'skip_tokenizer_init' cannot be set", marks=VLLM),
        pytest.param("vllm", {"worker_extension_cls": "x.Y"}, "'worker_extension_cls' cannot be set", marks=VLLM),
        pytest.param("vllm", {"model": "other"}, "'model' cannot be set: .*model_path", marks=VLLM),
        pytest.param("vllm", {"quantization": "fp8"}, "'quantization' cannot be set: .*checksum", marks=VLLM),
        pytest.param(
            "vllm", {"max_num_seqs": 8, "max_batch": 8}, "'max_num_seqs' and 'max_batch' set the same", marks=VLLM
        ),
    ],
)
def test_arguments_that_an_engine_does_not_take_are_refused_with_what_it_takes(engine, arguments, message):
    with pytest.raises(ConfigError, match=message):
        create(engine, **arguments)


@VLLM
def test_refused_arguments_are_arguments_of_vllm():
    from dataclasses import fields

    from vllm import EngineArgs

    from trial_ray.inference.engine_arguments import REFUSED, SAME

    assert {*REFUSED, *SAME} <= {field.name for field in fields(EngineArgs)}


@pytest.mark.parametrize(
    ("gpus", "engine_kwargs", "expected"),
    [
        (0, {}, "float32"),
        (1, {}, "bfloat16"),
        (0.5, {}, "bfloat16"),
        (1, {"dtype": "float32"}, "float32"),
        (0, {"dtype": "bfloat16"}, "bfloat16"),
    ],
)
def test_engines_with_a_gpu_compute_in_bfloat16_unless_told_otherwise(gpus, engine_kwargs, expected):
    config = GRPOConfig().engines(num_gpus_per_engine=gpus, engine_kwargs=engine_kwargs)
    assert config.engine_dtype() == expected
    assert engine_dtype(engine_kwargs.get("dtype"), on_gpu=gpus > 0) == expected


def test_a_dtype_in_which_no_engine_computes_is_refused_with_the_config():
    config = GRPOConfig().environment("trial/ALFWorld-v0").policy(model_path="m")
    with pytest.raises(ConfigError, match="dtype='fp32'"):
        config.engines(engine_kwargs={"dtype": "fp32"}).validate()


@pytest.mark.parametrize(
    ("setting", "device", "expected"),
    [
        (None, "cpu", None),
        (None, "cuda", torch.bfloat16),
        ("float32", "cuda", None),
        ("float32", "cpu", None),
        ("bfloat16", "cpu", torch.bfloat16),
        ("float16", "cuda", torch.float16),
    ],
)
def test_learners_compute_in_bfloat16_on_a_gpu_unless_told_otherwise(setting, device, expected):
    assert compute_dtype(setting, device) is expected
