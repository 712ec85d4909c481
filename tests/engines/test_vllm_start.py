"""With which arguments and environment a vLLM engine starts on CUDA; no GPU is used."""

import os
from types import SimpleNamespace

import pytest
import torch

from trial_ray.engines.pool import EnginePool
from trial_ray.engines.vllm import VLLMEngine
from trial_ray.errors import ConfigError

pytestmark = pytest.mark.vllm


@pytest.fixture
def gpu(monkeypatch):
    """torch reports a GPU of a compute capability; an H100 by default."""

    def report(major=9, minor=0):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, minor))

    report()
    return report


@pytest.fixture
def started(gpu, monkeypatch, tiny_qwen3):
    """Start an engine as far as vLLM is called; returns vLLM's arguments and the environment at that moment."""
    from vllm.v1.engine.llm_engine import LLMEngine

    monkeypatch.setattr(os, "environ", {**os.environ})
    found = []

    def from_engine_args(arguments):
        found.append((arguments, dict(os.environ)))
        return SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: 300))

    monkeypatch.setattr(LLMEngine, "from_engine_args", from_engine_args)

    def start(**arguments):
        VLLMEngine(str(tiny_qwen3), max_model_len=64, **arguments)._open()
        return found[-1]

    return start


def test_model_runner_and_scheduling_are_vllms_choice_or_the_settings(started):
    arguments, environment = started()
    assert arguments.async_scheduling is None
    assert "VLLM_USE_V2_MODEL_RUNNER" not in environment
    arguments, environment = started(async_scheduling=False, v2_model_runner=False)
    assert arguments.async_scheduling is False
    assert environment["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert started(v2_model_runner=True)[1]["VLLM_USE_V2_MODEL_RUNNER"] == "1"


def test_batch_invariance_is_refused_where_vllm_has_none(gpu, monkeypatch):
    refused = pytest.raises(ConfigError, match=r"batch_invariant: .*compute capability 8\.0.*num_gpus_per_engine")
    gpu(8, 0)
    VLLMEngine("nowhere", max_model_len=64, batch_invariant=True)
    gpu(7, 5)
    with refused:
        VLLMEngine("nowhere", max_model_len=64, batch_invariant=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with refused:
        VLLMEngine("nowhere", max_model_len=64, batch_invariant=True)
    with refused:  # before any actor starts
        EnginePool.create(
            engine="vllm", model_path="m", num_engines=1, engine_kwargs={"max_model_len": 64, "batch_invariant": True}
        )
