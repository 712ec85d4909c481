"""vLLM's mixtures of experts after new weights are the policy that was sent."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trial_ray.engines.agreement import own_logprobs
from trial_ray.engines.weights import WeightsChecksum, WeightShards

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(600)]


def test_experts_that_are_sent_are_those_that_are_computed_with(tmp_path, monkeypatch):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from trial_ray.engines import vllm as module

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
    engine = module.VLLMEngine(str(tmp_path), dtype="float32", max_model_len=64, num_threads=1)
    engine._open()
    text = np.arange(20, 60, dtype=np.int32)
    try:
        for _ in range(2):
            np.testing.assert_allclose(engine._score(text), own_logprobs(model, text), atol=1e-4)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.1)
            sent, tensors = WeightsChecksum(), dict(model.named_parameters())
            for name, tensor in tensors.items():
                sent.add(name, tensor)
            monkeypatch.setattr(module, "iter_shards", lambda _, tensors=tensors: [tensors])
            held = engine._replace_weights(WeightShards(1, sent.hexdigest, sent.arrangement, []))
            assert held == (sent.hexdigest, sent.arrangement)
        np.testing.assert_allclose(engine._score(text), own_logprobs(model, text), atol=1e-4)
    finally:
        engine._close()
