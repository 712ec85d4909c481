"""Decoding of the transformers engine: batches, the key-value cache, sampling from the reported distribution, architectures."""

import gc
import math
import weakref
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from architectures import VOCABULARY, random_model, save_model

from trial_ray.engines.decoding import Batch, by_length, sample_tokens
from trial_ray.engines.protocol import Request, SamplingParams
from trial_ray.engines.settings import MAX_ROWS
from trial_ray.engines.transformers import (
    JOINING_SHARE,
    MAX_JOIN_DELAY,
    TransformersEngine,
    free_memory,
    rows_that_fit,
    try_cache,
)
from trial_ray.engines.weights import own_logprobs
from trial_ray.errors import ConfigError, EngineError


def make_requests(sizes=((3, 9), (17, 12), (9, 4), (23, 10))):
    """Return requests of these lengths of the prompt and of the response."""
    return [
        Request(np.random.randint(3, VOCABULARY, length), SamplingParams(int(limit), seed=seed))
        for seed, (length, limit) in enumerate(sizes)
    ]


def test_the_cache_stays_small_while_rows_come_and_go(model):
    batch = Batch(model, frozenset())
    requests = make_requests(np.random.randint((2, 1), 40, (16, 2)))
    rooms = set()
    while requests or len(batch):
        if len(batch):
            batch.step()
        if requests and len(batch) < 4:
            batch.admit([requests.pop()])
        rooms.add(batch.cache.room)
    assert max(columns for _, columns in rooms) <= 2 * (40 + 40)  # Twice the longest row.
    assert len(rooms) <= 12  # It does not grow with every token.


def test_the_cache_is_freed_with_its_batch(model):
    batch = Batch(model, frozenset())
    batch.admit(make_requests())
    batch.step()
    buffers = [weakref.ref(buffer) for layer in batch.cache.layers for buffer in layer.buffers]
    gc.disable()
    try:
        del batch
        assert {buffer() for buffer in buffers} == {None}
    finally:
        gc.enable()


def test_prompts_of_similar_length_are_prefilled_together():
    lengths = [10] * 50 + [900, 850] + [4000] * 3
    parts = by_length([Request(np.zeros(length), SamplingParams(1)) for length in lengths])
    assert [[len(r.prompt_ids) for r in part] for part in parts] == [[4000] * 2, [4000], [900, 850], [10] * 50]


def test_few_requests_wait_for_more_to_join_them(tiny_qwen3):
    engine = TransformersEngine(str(tiny_qwen3), max_model_len=200, max_batch=80, num_threads=1)
    engine._open()
    engine._loop = Mock()

    def step(count):
        requests = [Request(np.arange(10, 20), SamplingParams(60, temperature=0)) for _ in range(count)]
        engine._join(requests)
        engine._run_step()
        return requests

    assert all(request.response_ids for request in step(32))
    running = len(engine._batch)
    [late] = step(1)
    for _ in range(MAX_JOIN_DELAY - 1):
        step(0)
    assert not late.response_ids
    step(0)
    assert len(late.response_ids) == 1
    assert all(len(request.response_ids) == 1 for request in step(math.ceil(JOINING_SHARE * (running + 1))))
    engine._close()


def test_the_batch_size_follows_from_free_memory_up_to_a_limit(model):
    size = try_cache(model, 100)
    assert size == 2 * 2 * 2 * 32 * 4  # keys and values, layers, heads, width, bytes
    assert rows_that_fit(size, 100, 2 * 150 * size * 17) == 17
    assert rows_that_fit(size, 100, free_memory(torch.device("cpu"))) == MAX_ROWS
    with pytest.raises(EngineError):
        rows_that_fit(size, 10_000, 2**20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_as_frequent_as_their_logprobs_say(dtype):
    count = 20_000
    logits = (4 * torch.randn(1, 50)).to(dtype).expand(count, -1)
    uniforms = torch.rand(count, dtype=torch.float64)
    tokens, logprobs = sample_tokens(logits, torch.full((count,), 1.3), torch.full((count,), 0.8), uniforms)
    assert logprobs.dtype == torch.float32
    probabilities = torch.zeros(50, dtype=torch.float64).scatter(0, tokens, logprobs.double().exp())
    assert float(probabilities.sum()) == pytest.approx(1, abs=1e-6)
    deviations = (probabilities * (1 - probabilities) / count).sqrt()
    assert ((tokens.bincount(minlength=50) / count - probabilities).abs() <= 5 * deviations).all()


LONGEST = 64
CACHED = ("llama", "qwen3", "gemma4", "gpt-oss", "deepseek-v3", "phi3", "gpt2")
"""Architectures that must use the cache, without which they would be slow."""
OTHERS = ("mamba", "qwen3-next", "llama4", "phi3-longrope", "mistral")


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
        row = np.array([*request.prompt_ids, *request.response_ids])
        np.testing.assert_allclose(request.logprobs, own_logprobs(model, row, len(request.response_ids)), atol=2e-5)


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
