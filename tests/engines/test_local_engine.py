"""The engine of a model in this process: what becomes of one request touches no other."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from fake_engines import passes

from trial_ray.engines.decoding import Batch
from trial_ray.engines.protocol import InvalidRequestError, SamplingParams
from trial_ray.engines.transformers import LocalEngine

PARAMS = SamplingParams(max_tokens=12, seed=1)


def prompts(count):
    rng = np.random.default_rng(0)
    return [rng.integers(12, 300, length).astype(np.int32) for length in range(3, 3 + count)]


def served(engine, count=3):
    """Whether requests are answered."""

    async def ask():
        async with asyncio.timeout(60):
            return await asyncio.gather(*[engine.generate(prompt, PARAMS) for prompt in prompts(count)])

    return [response.response_ids.tolist() for response in asyncio.run(ask())]


@pytest.mark.parametrize("passes", [0, 5])
def test_a_request_that_is_cancelled_fails_no_other(model, passes):
    engine = LocalEngine(model, frozenset())
    expected = served(LocalEngine(model, frozenset()))

    async def cancel_one():
        tasks = [asyncio.ensure_future(engine.generate(prompt, PARAMS)) for prompt in prompts(3)]
        for _ in range(passes):
            await asyncio.sleep(0)
        tasks[1].cancel()
        async with asyncio.timeout(60):
            return await asyncio.gather(*tasks, return_exceptions=True)

    first, cancelled, last = asyncio.run(cancel_one())
    assert isinstance(cancelled, asyncio.CancelledError)
    assert [first.response_ids.tolist(), last.response_ids.tolist()] == [expected[0], expected[2]]
    assert served(engine) == expected


def test_a_forward_pass_that_fails_fails_what_waits_and_nothing_later(model, monkeypatch):
    engine = LocalEngine(model, frozenset())
    expected = served(engine)

    async def break_once():
        tasks = [asyncio.ensure_future(engine.generate(prompt, PARAMS)) for prompt in prompts(3)]
        await passes(4)
        with monkeypatch.context() as patch:
            patch.setattr(Batch, "_forward", lambda *args: 1 / 0)
            return await asyncio.gather(*tasks, return_exceptions=True)

    assert {type(error) for error in asyncio.run(break_once())} == {ZeroDivisionError}
    assert served(engine) == expected


def test_a_request_that_is_wrong_is_refused_alone(model):
    engine = LocalEngine(model, frozenset())

    async def all_of_them():
        stopped, seeded = replace(PARAMS, stop=("x",)), replace(PARAMS, seed=np.int64(1))
        asked = [(np.array([5, 300], np.int32), PARAMS), (np.full(510, 5, np.int32), PARAMS)]
        asked += [(prompts(1)[0], stopped), (prompts(1)[0], seeded)]
        return await asyncio.gather(*[engine.generate(*each) for each in asked], return_exceptions=True)

    *refusals, response = asyncio.run(all_of_them())
    for refusal, message in zip(refusals, ("outside", "max_model_len=512", "stop: expected"), strict=True):
        assert isinstance(refusal, InvalidRequestError)
        assert message in str(refusal)
    assert [response.response_ids.tolist()] == served(engine, 1)
