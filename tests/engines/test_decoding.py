"""Decoding of the transformers engine: rows come and go, and each response is what it would be alone; log-probabilities are those
of the distribution that was sampled from."""

import gc
import math
import weakref

import numpy as np
import pytest
import torch

from trial_ray.engines.decoding import Batch, by_length, sample_tokens
from trial_ray.engines.protocol import SamplingParams
from trial_ray.engines.request import Request
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


def make_requests(count, seed=0, longest=120):
    rng = np.random.default_rng(seed)
    return [
        Request(
            rng.integers(10, 300, rng.integers(2, longest)).astype(np.int32),
            SamplingParams(max_tokens=int(rng.integers(1, 40)), seed=index),
        )
        for index in range(count)
    ]


def test_the_cache_stays_small_however_long_rows_keep_coming(model):
    batch, requests = Batch(model, frozenset()), make_requests(16, longest=40)
    rooms = set()
    while requests or len(batch):
        if len(batch):
            batch.step()
        if requests and len(batch) < 4:
            batch.admit([requests.pop()])
        rooms.add(batch.cache.room)
    most = 40 + 40  # tokens of the longest row
    assert max(columns for _, columns in rooms) <= 2 * most
    assert len(rooms) <= 12  # it grows by steps, not by tokens


def test_the_cache_is_freed_with_its_batch(model):
    """Python's collector runs too seldom for buffers of a hundred megabytes, of which every new weights leave one."""
    batch = Batch(model, frozenset())
    batch.admit(make_requests(2, longest=40))
    batch.step()
    buffers = [weakref.ref(buffer) for layer in batch.cache.layers for buffer in layer.buffers]
    gc.disable()
    try:
        del batch
        assert buffers
        assert {buffer() for buffer in buffers} == {None}
    finally:
        gc.enable()


def test_prompts_of_similar_length_are_prefilled_together():
    lengths = [10] * 50 + [900, 850] + [4000, 4000, 4000]
    parts = list(by_length([Request(np.zeros(n, np.int32), SamplingParams(1)) for n in lengths]))
    assert [[len(r.prompt_ids) for r in part] for part in parts] == [[4000] * 2, [4000], [900, 850], [10] * 50]


def test_few_requests_wait_for_more_to_join_them_but_not_for_long(tiny_qwen3):
    engine = TransformersEngine(str(tiny_qwen3), max_model_len=200, max_batch=80, num_threads=1)
    engine._open()
    many = [Request(np.arange(10, 20), SamplingParams(max_tokens=60, temperature=0)) for _ in range(32)]
    engine._step(many)
    assert len(engine._batch) + sum(bool(r.finish_reason) for r in many) == 32  # the first start at once
    running = len(engine._batch)
    late = Request(np.arange(10, 20), SamplingParams(max_tokens=60, temperature=0))
    for _ in range(MAX_STEPS_WAITED):
        engine._step([late] if late not in engine._waiting else [])
    assert not late.response_ids
    engine._step([])
    assert len(late.response_ids) == 1
    enough = math.ceil(JOINING_SHARE * (running + 1))
    more = [Request(np.arange(10, 20), SamplingParams(max_tokens=60, temperature=0)) for _ in range(enough)]
    engine._step(more)
    assert all(len(request.response_ids) == 1 for request in more)
    engine._close()


def test_the_batch_is_what_memory_holds_up_to_a_limit(model):
    size = try_cache(model, 100)
    assert size == 2 * 2 * 2 * 32 * 4  # keys and values, layers, heads, width, bytes
    assert rows_that_fit(size, 100, 2 * 150 * size * 17) == 17
    assert rows_that_fit(size, 100, free_memory(torch.device("cpu"))) == MAX_ROWS
    with pytest.raises(EngineError, match=r"max_model_len is 10000.*15 MiB.*Lower max_prompt_tokens"):
        rows_that_fit(size, 10_000, 2**20)


VOCAB = 50


def draw(logits, temperatures, top_ps, seed=0):
    uniforms = torch.rand(len(logits), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return sample_tokens(logits, torch.tensor(temperatures), torch.tensor(top_ps), uniforms)


def random_logits(rows, seed=0):
    return 4 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def expected(row, token, temperature, top_p):
    """float64, from the definition: the smallest set of most probable tokens whose mass reaches top_p, renormalised."""
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
    tokens, logprobs = draw(logits, [temperature] * 64, [top_p] * 64)
    assert logprobs.dtype == torch.float32
    for row, token, logprob in zip(logits, tokens.tolist(), logprobs.tolist(), strict=True):
        assert logprob == pytest.approx(expected(row, token, temperature, top_p), abs=1e-6)


@pytest.mark.parametrize(("temperature", "top_p"), [(0.7, 1.0), (1.3, 0.8)])
def test_tokens_come_as_often_as_their_logprobs_say(temperature, top_p):
    count = 20_000
    row = random_logits(1, seed=3)
    tokens, logprobs = draw(row.expand(count, -1), [temperature] * count, [top_p] * count)
    for token in tokens.unique().tolist():
        drawn = tokens == token
        probability = float(logprobs[drawn][0].exp())
        deviation = (probability * (1 - probability) / count) ** 0.5
        assert abs(float(drawn.double().mean()) - probability) < 5 * deviation
