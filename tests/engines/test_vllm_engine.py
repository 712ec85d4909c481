"""vLLM's engine without requests: its arguments and environment (no GPU is used), its log, and mixtures of experts."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_engines import digests

from trial_ray.engines import vllm as module
from trial_ray.engines.settings import LOG_LEVEL
from trial_ray.engines.vllm import VLLMEngine
from trial_ray.engines.weights import Weights, own_logprobs
from trial_ray.errors import ConfigError

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]


@pytest.fixture
def gpu(monkeypatch):
    """Function that makes torch report a GPU of a compute capability, or none; at first an H100."""

    def report(capability):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)

    report((9, 0))
    return report


def test_model_runner_and_scheduling_are_vllms_choice_or_the_settings(gpu, monkeypatch, tiny_qwen3):
    from vllm.v1.engine.llm_engine import LLMEngine

    starts = []

    def from_engine_args(arguments):
        starts.append((arguments.async_scheduling, os.environ.get("VLLM_USE_V2_MODEL_RUNNER")))
        return SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: 300))

    monkeypatch.setattr(os, "environ", {**os.environ})
    monkeypatch.setattr(LLMEngine, "from_engine_args", from_engine_args)
    for arguments in ({}, {"async_scheduling": False, "v2_model_runner": False}, {"v2_model_runner": True}):
        VLLMEngine(str(tiny_qwen3), max_model_len=64, **arguments)._open()
    assert starts == [(None, None), (False, "0"), (None, "1")]


def test_batch_invariance_is_rejected_without_a_gpu_that_has_it(gpu):
    gpu((8, 0))
    VLLMEngine("nowhere", max_model_len=64, batch_invariant=True)
    for capability in ((7, 5), None):
        gpu(capability)
        with pytest.raises(ConfigError):
            VLLMEngine("nowhere", max_model_len=64, batch_invariant=True)


SESSION = """
import sys
from pathlib import Path
from trial_ray.cli import console as terminal
from trial_ray.engines.pool import EnginePool
from trial_ray.runs.ray_session import ray_session
from trial_ray.runs.terminal import library_log

model, log = sys.argv[1], Path(sys.argv[2])
console = terminal.output()
with library_log(log, console), ray_session(show=True):
    pool = EnginePool(
        engine="vllm", model_path=model, num_engines=1, engine_kwargs={"max_model_len": 64, "kv_cache_gib": 0.1}
    )
    pool.start()
    console.print("started")
    sys.stdin.read()  # Ray shows the actor's output a moment later.
"""
CACHE_SIZE = "KV cache size: "


@pytest.mark.long
def test_the_cache_size_is_logged_to_the_file_only(tiny_qwen3, tmp_path):
    log = tmp_path / "logs" / "libraries.log"
    command = [sys.executable, "-c", SESSION, str(tiny_qwen3), str(log)]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    # TRL sets a level in the environment of a process that imports it.
    environment = {name: value for name, value in os.environ.items() if name != LOG_LEVEL}
    with subprocess.Popen(command, env=environment, **streams) as process:
        try:
            deadline = time.monotonic() + 240
            while process.poll() is None and time.monotonic() < deadline:
                if log.exists() and CACHE_SIZE in log.read_text():
                    break
                time.sleep(0.2)
        finally:
            shown, _ = process.communicate("", timeout=60)
    assert CACHE_SIZE in log.read_text()
    assert shown == "started\n"


@pytest.mark.long
def test_sent_experts_are_used(tmp_path, monkeypatch):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        eos_token_id=7,
        pad_token_id=0,
        dtype="float32",
    )
    model = Qwen3MoeForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    engine = VLLMEngine(str(tmp_path), dtype="float32", max_model_len=64, num_threads=1)
    engine._open()
    text = np.arange(20, 60, dtype=np.int32)
    try:
        for _ in range(2):
            np.testing.assert_allclose(engine._score(text), own_logprobs(model, text), atol=1e-4)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.1)
            tensors = dict(model.named_parameters())
            monkeypatch.setattr(module, "iter_shards", lambda _, tensors=tensors: [tensors])
            assert engine._replace_weights(Weights(1, *digests(tensors.items()))) == digests(tensors.items())
        np.testing.assert_allclose(engine._score(text), own_logprobs(model, text), atol=1e-4)
    finally:
        engine._close()
