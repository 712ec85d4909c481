"""Concurrent calls of one engine, and its shutdown: every call is answered, and none leaves a half-changed state."""

import asyncio
import pickle
import threading
from contextlib import nullcontext

import numpy as np
import pytest
from fake_engines import CountingEngine, passes, until

from trial_ray.engines.protocol import Response, SamplingParams
from trial_ray.engines.weights import TextLogprobs, Weights
from trial_ray.errors import EngineError, WeightSyncError

PROMPT = np.array([5, 6])
REQUEST = [(0, PROMPT, SamplingParams(3))]
WEIGHTS = Weights(4, "c", "a", [])


async def exchange(engine, requests=()):
    return pickle.loads(await engine.exchange("client", pickle.dumps(requests)))


class SlowEngine(CountingEngine):
    """Engine that records its sleeps and loads, which wait for ``go``."""

    def __init__(self):
        super().__init__()
        self.go = threading.Event()
        self.go.set()
        self.events = []

    def _record(self, event):
        self.events.append(event)
        assert self.go.wait(20)

    def _sleep(self, level):
        self._record(f"sleep {level}")

    def _wake(self, part):
        self._record(f"wake {part}")

    def _replace_weights(self, weights):
        self._record(f"load {weights.version}")
        return super()._replace_weights(weights)

    def _close(self):
        self.events.append("close")


def serving(engine, calls):
    """Return the result of a coroutine function that is called with an engine, which has weights and is shut down afterwards."""

    async def main():
        async with asyncio.timeout(20):
            await engine.ready()
            await engine.load_weights(WEIGHTS)
            result = await calls(engine)
            await engine.shutdown()
            return result

    return asyncio.run(main())


def test_concurrent_sleeps_and_wakes_take_turns_and_happen_once():
    async def calls(engine):
        await asyncio.gather(*[engine.sleep() for _ in range(2)], *[engine.wake("weights") for _ in range(3)])
        await asyncio.gather(*[engine.wake("cache") for _ in range(3)])
        await asyncio.gather(exchange(engine, REQUEST), engine.sleep())

    serving(engine := SlowEngine(), calls)
    assert engine.events == ["load 4", "sleep 1", "wake weights", "wake cache", "sleep 1", "close"]


@pytest.mark.parametrize(("num_requests", "first"), [(60, (0, 1, 2)), (20, (0, 1))])
def test_few_answers_wait_up_to_two_steps_for_more(num_requests, first):
    lengths = [1, 2, 3, *[5] * (num_requests - 3)]

    async def calls(engine):
        requests = [(number, PROMPT, SamplingParams(length)) for number, length in enumerate(lengths)]
        answers = [await exchange(engine, requests)]
        engine.go_on()
        while sum(map(len, answers)) < num_requests:
            answers.append(await exchange(engine))
        return answers

    answers = serving(CountingEngine(steps=len(first)), calls)
    assert tuple(number for number, _ in answers[0]) == first
    assert sorted(number for message in answers for number, _ in message) == list(range(num_requests))


ONE_SHORT = [(number, PROMPT, SamplingParams(1 + 50 * (number > 0))) for number in range(40)]


def test_answers_are_sent_when_all_other_requests_are_aborted():
    async def calls(engine):
        call = asyncio.create_task(exchange(engine, ONE_SHORT))
        await until(lambda: engine._finished)
        await engine.abort("client", range(1, 40))
        engine.go_on()
        return await call

    ((number, _),) = serving(CountingEngine(steps=1), calls)
    assert number == 0


def test_a_failed_step_keeps_answers_that_had_finished():
    async def calls(engine):
        call = asyncio.create_task(exchange(engine, ONE_SHORT))
        await until(lambda: engine._finished)
        engine.broken = True
        engine.go_on()
        answers = await call
        if len(answers) < 40:
            answers += await exchange(engine)
        return {number for number, answer in answers if isinstance(answer, Response)}, len(answers)

    assert serving(CountingEngine(steps=1), calls) == ({0}, 40)


def test_every_waiting_call_is_answered_at_a_shutdown():
    async def calls(engine):
        engine.go.clear()
        waiting = [asyncio.ensure_future(engine.load_weights(WEIGHTS))]
        await until(lambda: len(engine.events) == 2)
        later = [engine.load_weights(WEIGHTS), engine.sleep(), engine._in_thread(engine._sleep, 1)]
        waiting += map(asyncio.ensure_future, [*later, exchange(engine, REQUEST)])
        await passes()
        shutdown = asyncio.ensure_future(engine.shutdown())
        await passes()
        waiting.append(asyncio.ensure_future(engine._in_thread(engine._sleep, 2)))
        engine.go.set()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        await shutdown
        return results

    loaded, *failed, answers, late = serving(engine := SlowEngine(), calls)
    assert loaded == (4, "c")
    for error in (*failed, late, dict(answers)[0]):
        assert isinstance(error, EngineError)
    assert engine.events == ["load 4", "load 4", "close"]


def test_calls_after_the_shutdown_are_rejected():
    async def calls(engine):
        await asyncio.gather(engine.shutdown(), engine.shutdown())
        late = [engine.ready(), engine.weight_version(), engine.load_weights(WEIGHTS), engine.sleep()]
        return await asyncio.gather(*late, engine.wake("cache"), exchange(engine, REQUEST), return_exceptions=True)

    assert all(isinstance(error, EngineError) for error in serving(CountingEngine(), calls))


def test_no_request_is_sampled_under_unverified_weights():
    async def calls(engine):
        engine._replace_weights = lambda weights: ("another", "a")
        update, answers = await asyncio.gather(
            engine.load_weights(WEIGHTS), exchange(engine, REQUEST), return_exceptions=True
        )
        assert isinstance(update, WeightSyncError)
        assert all(isinstance(answer, EngineError) or answer.weight_version == 4 for _, answer in answers)
        assert await engine.weight_version() == -1

    serving(CountingEngine(), calls)


@pytest.mark.parametrize(("logprob", "version"), [(-0.59, 5), (-0.61, -1), (np.nan, 5)])
def test_an_engine_that_computes_another_policy_does_not_wake(logprob, version):
    """The sender computed this log-probability for every token of a text; the fake engine computes -0.5."""
    text = TextLogprobs(np.arange(4), np.full(3, logprob), 0.1, "ModelForCausalLM")

    async def calls(engine):
        await engine.sleep(2)
        await engine.wake("weights")
        await engine.load_weights(Weights(5, "c", "a", [], text=text))
        with nullcontext() if version == 5 else pytest.raises(WeightSyncError):
            await engine.wake("cache")
            assert dict(await exchange(engine, REQUEST))[0].weight_version == 5
        assert await engine.weight_version() == version

    serving(CountingEngine(), calls)
