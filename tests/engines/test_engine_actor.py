"""Concurrent calls of one engine, and its shutdown: every call is answered, and none leaves a half-changed state."""

import asyncio
import pickle
import threading

import numpy as np
import pytest
from fake_engines import CountingEngine, passes, until

from trial_ray.engines.protocol import Response, SamplingParams
from trial_ray.engines.weights import TextLogprobs, Weights
from trial_ray.errors import EngineError, WeightSyncError

PROMPT = np.array([5, 6], np.int32)
REQUEST = [(0, PROMPT, SamplingParams(max_tokens=3))]
WEIGHTS = Weights(4, "c", "a", [])


async def exchange(engine, requests=()):
    return pickle.loads(await engine.exchange("client", pickle.dumps(requests)))


def with_text(logprob):
    """Weights whose sender computed this log-probability for every token of a text; the fake engine computes -0.5."""
    text = TextLogprobs(np.arange(4, dtype=np.int32), np.full(3, logprob, np.float32), 0.1, "ModelForCausalLM")
    return Weights(5, "c", "a", [], text=text)


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


def test_a_failed_step_keeps_answers_that_had_finished():
    async def calls(engine):
        requests = [(number, PROMPT, SamplingParams(1 + 50 * (number > 0))) for number in range(40)]
        call = asyncio.create_task(exchange(engine, requests))
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
        running = asyncio.ensure_future(engine.load_weights(WEIGHTS))
        await until(lambda: len(engine.events) == 2)
        later = [
            engine.load_weights(WEIGHTS),
            engine.sleep(),
            engine._in_thread(engine._sleep, 1),
            exchange(engine, REQUEST),
        ]
        waiting = [running, *map(asyncio.ensure_future, later)]
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


@pytest.mark.parametrize(("logprob", "agrees"), [(-0.59, True), (-0.61, False), (np.nan, True)])
def test_an_engine_that_computes_another_policy_does_not_wake(logprob, agrees):
    async def calls(engine):
        await engine.sleep(2)
        await engine.wake("weights")
        await engine.load_weights(with_text(logprob))
        if agrees:
            await engine.wake("cache")
            assert dict(await exchange(engine, REQUEST))[0].weight_version == 5
        else:
            with pytest.raises(WeightSyncError):
                await engine.wake("cache")
        assert await engine.weight_version() == (5 if agrees else -1)

    serving(CountingEngine(), calls)
