"""vLLM's engine without requests: its arguments and environment (no GPU is used), and mixtures of experts."""

import os
from functools import partial

import numpy as np
import pytest
from architectures import config_of, randomise
from fake_engines import digests
from transformers import AutoModelForCausalLM

from trial_ray.engines.vllm import VLLMEngine
from trial_ray.engines.weights import Weights, own_logprobs
from trial_ray.errors import ConfigError

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

make = partial(VLLMEngine, "nowhere", max_model_len=64)


@pytest.fixture
def gpu(monkeypatch):
    """Function that makes torch report a GPU of a compute capability, or none; at first an H100."""

    def report(capability):
        monkeypatch.setattr("torch.cuda.is_available", lambda: capability is not None)
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)

    report((9, 0))
    return report


def test_model_runner_and_compilation_are_chosen_by_the_environment(gpu, monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    make()._set_environment()
    assert not {"VLLM_USE_V2_MODEL_RUNNER", "TORCH_COMPILE_DISABLE"} & os.environ.keys()
    gpu(None)
    make(v2_model_runner=False)._set_environment()
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert os.environ["TORCH_COMPILE_DISABLE"] == "1"


def test_users_arguments_come_before_the_defaults(gpu):
    """A cache of given size needs no free share of the GPU."""
    names = ("kv_cache_memory_bytes", "gpu_memory_utilization", "max_num_batched_tokens", "async_scheduling")
    for arguments, expected in (
        ({"kv_cache_gib": 2.0}, [2 << 30, 0.01, 8192, None]),
        ({"max_model_len": 16_384, "async_scheduling": False}, [None, 0.9, 16_384, False]),
        ({"max_num_batched_tokens": 4096}, [None, 0.9, 4096, None]),
    ):
        assert list(map(make(**arguments)._arguments.get, names)) == expected


def test_batch_invariance_is_rejected_without_a_gpu_that_has_it(gpu):
    gpu((8, 0))
    make(batch_invariant=True)
    for capability in ((7, 5), None):
        gpu(capability)
        with pytest.raises(ConfigError):
            make(batch_invariant=True)


@pytest.mark.long
def test_sent_experts_are_used(tmp_path, monkeypatch):
    config = config_of("qwen3-moe")
    config.head_dim = 32  # vLLM's attention on CPUs has no kernel for smaller heads.
    model = AutoModelForCausalLM.from_config(config).eval()
    randomise(model)
    model.save_pretrained(tmp_path)
    engine = VLLMEngine(str(tmp_path), dtype="float32", max_model_len=64, num_threads=1)
    engine._open()
    text = np.arange(20, 60)
    try:
        for seed in (1, 2):
            np.testing.assert_allclose(engine._score(text), own_logprobs(model, text), atol=1e-4)
            randomise(model, seed)
            tensors = dict(model.named_parameters())
            monkeypatch.setattr("trial_ray.engines.vllm.iter_shards", lambda _, tensors=tensors: [tensors])
            assert engine._replace_weights(Weights(1, *digests(tensors.items()))) == digests(tensors.items())
        np.testing.assert_allclose(engine._score(text), own_logprobs(model, text), atol=1e-4)
    finally:
        engine._close()
