"""The transformers engine over architectures: it samples with the model's own log-probabilities, or rejects the model."""

from __future__ import annotations

import numpy as np
import pytest
from architectures import VOCABULARY, random_model, save_model

from trial_ray.engines.decoding import Batch
from trial_ray.engines.protocol import Request, SamplingParams
from trial_ray.engines.transformers import TransformersEngine, try_cache
from trial_ray.engines.weights import own_logprobs
from trial_ray.errors import ConfigError

LONGEST = 64
CACHED = (
    "llama", "qwen2", "qwen3", "qwen3-moe", "gemma3", "gemma4", "gpt-oss", "glm4-moe", "deepseek-v3", "phi3", "gpt2",
)  # fmt: skip
"""Architectures that must use the cache, without which they would be slow."""
OTHERS = ("mamba", "rwkv", "qwen3-next", "llama4", "phi3-longrope", "recurrentgemma", "mistral")


def make_requests():
    random = np.random.default_rng(0)
    sizes = [(3, 9), (17, 12), (9, 4), (23, 10)]
    return [
        Request(random.integers(3, VOCABULARY, length, np.int32), SamplingParams(max_tokens, seed=seed))
        for seed, (length, max_tokens) in enumerate(sizes)
    ]


@pytest.mark.parametrize("name", [*CACHED, *OTHERS])
def test_rows_that_come_and_go_have_the_models_logprobs(name):
    model, requests = random_model(name), make_requests()
    cached = try_cache(model, LONGEST) is not None
    assert cached or name not in CACHED
    batch = Batch(model, frozenset(), cached=cached)
    batch.admit(requests[:2])
    batch.step()
    batch.admit(requests[2:])
    while len(batch):
        batch.step()
    for request in requests:
        row = np.array([*request.prompt_ids, *request.response_ids], np.int32)
        own = own_logprobs(model, row)[len(request.prompt_ids) - 1 :]
        np.testing.assert_allclose(request.logprobs, own, atol=2e-5)


def test_an_engine_decodes_without_a_cache_if_necessary(tmp_path):
    engine = TransformersEngine(save_model("qwen3.5", tmp_path), max_model_len=LONGEST, device="cpu", max_batch=2)
    assert engine._open()["vocab_size"] == VOCABULARY
    assert engine._batch.cache is None
    requests = make_requests()
    finished = engine._step(requests)
    while len(finished) < len(requests):
        finished += engine._step([])
    assert all(request.finish_reason for request in requests)


def test_a_model_whose_logprobs_depend_on_earlier_rows_is_rejected(tmp_path):
    engine = TransformersEngine(save_model("llama-dynamic-rope", tmp_path), max_model_len=16, device="cpu")
    with pytest.raises(ConfigError, match="LlamaForCausalLM"):
        engine._open()
