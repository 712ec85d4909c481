"""The engine of a model in this process: a failed or cancelled request does not affect others."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from fake_engines import passes

from trial_ray.engines.decoding import Batch
from trial_ray.engines.protocol import InvalidRequestError, Response, SamplingParams
from trial_ray.engines.transformers import LocalEngine

PARAMS = SamplingParams(12, seed=1)
REQUESTS = [(np.arange(length, 2 * length), PARAMS) for length in (30, 40, 50)]


@pytest.fixture
def engine(model):
    return LocalEngine(model, frozenset())


def run(engine, requests=REQUESTS, meanwhile=lambda tasks: passes(0)):
    """Send requests, run ``meanwhile`` with their tasks, and return the responses' ids or the errors."""

    async def main():
        tasks = [asyncio.ensure_future(engine.generate(*request)) for request in requests]
        await meanwhile(tasks)
        async with asyncio.timeout(60):
            return await asyncio.gather(*tasks, return_exceptions=True)

    return [each.response_ids.tolist() if isinstance(each, Response) else each for each in asyncio.run(main())]


def test_a_cancelled_request_affects_no_other(engine):
    expected = run(engine)

    async def cancel_one(tasks):
        await passes(5)
        tasks[1].cancel()

    first, cancelled, last = run(engine, meanwhile=cancel_one)
    assert isinstance(cancelled, asyncio.CancelledError)
    assert [first, last] == [expected[0], expected[2]]
    assert run(engine) == expected


def test_a_failed_forward_pass_fails_no_later_request(engine, monkeypatch):
    expected = run(engine)

    async def break_once(tasks):
        await passes(4)
        with monkeypatch.context() as patch:
            patch.setattr(Batch, "_forward", lambda *args: 1 / 0)
            await asyncio.wait(tasks, timeout=60)

    assert {type(error) for error in run(engine, meanwhile=break_once)} == {ZeroDivisionError}
    assert run(engine) == expected


def test_an_invalid_request_is_rejected_alone(engine):
    prompt, _ = REQUESTS[0]
    requests = [
        (np.array([5, 300]), PARAMS),
        (np.full(510, 5), PARAMS),
        (prompt, replace(PARAMS, stop=("x",))),
        (prompt, replace(PARAMS, seed=np.int64(1))),
    ]
    *errors, response = run(engine, requests)
    assert [type(error) for error in errors] == [InvalidRequestError] * 3
    assert [response] == run(engine, REQUESTS[:1])
