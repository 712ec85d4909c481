"""Settings of engines: dtypes by device, and arguments that are rejected before any actor starts."""

from types import SimpleNamespace

import pytest
import torch
from rejections import misconfigured
from transformers import Qwen3Config

from trial_ray import GRPOConfig
from trial_ray.engines.pool import EnginePool
from trial_ray.engines.requirements import require_engine
from trial_ray.engines.settings import check_positions, engine_dtype
from trial_ray.engines.transformers import TransformersEngine
from trial_ray.errors import MissingDependencyError
from trial_ray.models.model_shape import max_positions
from trial_ray.models.module import compute_dtype


def create(engine, folder="folder", num_engines=1, **kwargs):
    """Create a pool; no test here starts Ray, so the arguments must be rejected before."""
    EnginePool(engine=engine, model_path=folder, num_engines=num_engines, engine_kwargs={"max_model_len": 64, **kwargs})


@pytest.mark.parametrize(
    ("engine", "arguments"),
    [
        ("sglang", {}),
        ("transformers", {"num_engines": 0}),
        ("transformers", {"max_batches": 8}),
        ("transformers", {"dtype": "bf16"}),
        ("transformers", {"max_batch": 0}),
        ("transformers", {"max_model_len": None}),
        *(
            pytest.param("vllm", arguments, marks=pytest.mark.vllm)
            for arguments in (
                {"tensor_parallel_size": 2},
                {"enable_sleep_mode": True},
                {"batch_invariant": True},
                {"enable_chunked_prefill": True},
                {"seed": "7"},
                {"log_level": "LOUD"},
                {"quantization": "fp8"},
                {"max_num_seqs": 8, "max_batch": 8},
            )
        ),
    ],
)
def test_invalid_arguments_of_an_engine_are_rejected(engine, arguments):
    misconfigured(None, create, engine, **arguments)


def test_an_engine_that_is_not_installed_is_rejected(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError):
        create("vllm")


def test_contexts_longer_than_the_models_positions_are_rejected(tiny_qwen3):
    folder = str(tiny_qwen3)
    misconfigured(None, create, "transformers", folder, max_model_len=513)
    misconfigured(None, TransformersEngine(folder, max_model_len=513)._open)
    check_positions("a folder of another node", 513)


def test_scaled_rotary_embeddings_have_the_positions_of_vllm():
    for rope, expected in (
        ({"rope_type": "default"}, 1000),
        ({"rope_type": "linear", "factor": 4.0}, 4000),
        ({"rope_type": "dynamic", "factor": 2.5}, 2500),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 250}, 1000),
    ):
        config = Qwen3Config(max_position_embeddings=1000, rope_parameters={"rope_theta": 1e4, **rope})
        assert max_positions(config) == expected


def test_vllm_for_gpus_is_rejected_without_a_gpu(monkeypatch):
    require_engine("vllm", 0)
    monkeypatch.setattr("importlib.metadata.distributions", lambda name: [SimpleNamespace(version="0.32.0")])
    misconfigured(None, require_engine, "vllm", 0)
    require_engine("vllm", 0.5)


def test_engines_and_learners_on_a_gpu_compute_in_bfloat16_by_default():
    for given, gpus, engine, learner in (
        (None, 0, "float32", None),
        (None, 1, "bfloat16", torch.bfloat16),
        ("float32", 1, "float32", None),
        ("bfloat16", 0, "bfloat16", torch.bfloat16),
    ):
        config = GRPOConfig().engines(num_gpus_per_engine=gpus, engine_kwargs={"dtype": given} if given else {})
        assert config.engine_dtype() == engine_dtype(given, on_gpu=gpus > 0) == engine
        assert compute_dtype(given, "cuda" if gpus else "cpu") is learner
