"""Decoding of the transformers engine: batches, the key-value cache, and sampling from the reported distribution."""

import gc
import math
import weakref

import numpy as np
import pytest
import torch

from trial_ray.engines.decoding import Batch, by_length, sample_tokens
from trial_ray.engines.protocol import Request, SamplingParams
from trial_ray.engines.settings import MAX_ROWS
from trial_ray.engines.transformers import (
    JOINING_SHARE,
    MAX_STEPS_WAITED,
    TransformersEngine,
    free_memory,
    rows_that_fit,
    try_cache,
)
from trial_ray.errors import EngineError


def make_requests(count):
    rng = np.random.default_rng(0)
    lengths = zip(rng.integers(2, 40, count), rng.integers(1, 40, count), strict=True)
    return [Request(np.full(length, 11, np.int32), SamplingParams(int(limit), seed=0)) for length, limit in lengths]


def test_the_cache_stays_small_while_rows_come_and_go(model):
    batch, requests = Batch(model, frozenset()), make_requests(16)
    rooms = set()
    while requests or len(batch):
        if len(batch):
            batch.step()
        if requests and len(batch) < 4:
            batch.admit([requests.pop()])
        rooms.add(batch.cache.room)
    max_row_tokens = 40 + 40
    assert max(columns for _, columns in rooms) <= 2 * max_row_tokens
    assert len(rooms) <= 12  # It does not grow with every token.


def test_the_cache_is_freed_with_its_batch(model):
    batch = Batch(model, frozenset())
    batch.admit(make_requests(2))
    batch.step()
    buffers = [weakref.ref(buffer) for layer in batch.cache.layers for buffer in layer.buffers]
    gc.disable()
    try:
        del batch
        assert {buffer() for buffer in buffers} == {None}
    finally:
        gc.enable()


def test_prompts_of_similar_length_are_prefilled_together():
    lengths = [10] * 50 + [900, 850] + [4000, 4000, 4000]
    parts = by_length([Request(np.zeros(length, np.int32), SamplingParams(1)) for length in lengths])
    assert [[len(r.prompt_ids) for r in part] for part in parts] == [[4000] * 2, [4000], [900, 850], [10] * 50]


def test_few_requests_wait_for_more_to_join_them(tiny_qwen3):
    engine = TransformersEngine(str(tiny_qwen3), max_model_len=200, max_batch=80, num_threads=1)
    engine._open()

    def step(count):
        requests = [Request(np.arange(10, 20), SamplingParams(max_tokens=60, temperature=0)) for _ in range(count)]
        engine._step(requests)
        return requests

    first = step(32)
    assert all(request.response_ids for request in first)
    running = len(engine._batch)
    [late] = step(1)
    for _ in range(MAX_STEPS_WAITED - 1):
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


def draw(rows, temperature, top_p):
    """Sample one token per row of logits ``[B, V]`` with uniform draws of a fixed seed."""
    count = len(rows)
    uniforms = torch.rand(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return sample_tokens(rows, torch.full((count,), temperature), torch.full((count,), top_p), uniforms)


def random_logits(rows, seed=0):
    return 4 * torch.randn(rows, 50, generator=torch.Generator().manual_seed(seed))


def nucleus_logprob(row, token, temperature, top_p):
    """float64 reference: renormalise over the smallest set of most probable tokens whose mass reaches ``top_p``."""
    probs = torch.softmax(row.double() / temperature, -1)
    mass, nucleus = 0.0, []
    for index in probs.argsort(descending=True).tolist():
        nucleus.append(index)
        mass += float(probs[index])
        if mass >= top_p:
            break
    assert token in nucleus
    return float((probs[token] / probs[nucleus].sum()).log())


@pytest.mark.parametrize(("temperature", "top_p"), [(0.3, 1.0), (1.0, 0.8), (1.3, 0.3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_of_the_tempered_and_truncated_distribution(temperature, top_p, dtype):
    logits = random_logits(64).to(dtype)
    tokens, logprobs = draw(logits, temperature, top_p)
    assert logprobs.dtype == torch.float32
    for row, token, logprob in zip(logits, tokens.tolist(), logprobs.tolist(), strict=True):
        assert logprob == pytest.approx(nucleus_logprob(row, token, temperature, top_p), abs=1e-6)


@pytest.mark.parametrize(("temperature", "top_p"), [(0.7, 1.0), (1.3, 0.8)])
def test_tokens_are_as_frequent_as_their_logprobs_say(temperature, top_p):
    count = 20_000
    tokens, logprobs = draw(random_logits(1, seed=3).expand(count, -1), temperature, top_p)
    for token in tokens.unique().tolist():
        drawn = tokens == token
        probability = float(logprobs[drawn][0].exp())
        deviation = (probability * (1 - probability) / count) ** 0.5
        assert abs(float(drawn.double().mean()) - probability) < 5 * deviation
