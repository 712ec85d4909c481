"""Calls to one engine at the same time, and at its end: each is answered, and none finds what another left half done."""

from __future__ import annotations

import asyncio
import pickle
import threading

import numpy as np
import pytest
from fake_engines import CountingEngine, passes, until

from trial_ray.engines.protocol import Response, SamplingParams
from trial_ray.engines.weights import TextLogprobs, Weights
from trial_ray.errors import EngineError, WeightSyncError

REQUEST = [(0, np.array([5, 6], np.int32), SamplingParams(max_tokens=3))]
WEIGHTS = Weights(4, "c", "a", [])


async def exchange(engine, requests=()):
    return pickle.loads(await engine.exchange("client", pickle.dumps(requests)))


def of_text(logprob):
    """Weights whose sender found this log-probability for every token of a text; the engine of these tests finds -0.5."""
    text = TextLogprobs(np.arange(4, dtype=np.int32), np.full(3, logprob, np.float32), 0.1, "ModelForCausalLM")
    return Weights(5, "c", "a", [], text=text)


class SlowEngine(CountingEngine):
    """Its steps, sleeps and loads wait until they are let go."""

    def __init__(self):
        super().__init__()
        self.go = threading.Event()
        self.events = []

    def _note(self, event):
        self.events.append(event)
        assert self.go.wait(20)

    def _open(self):
        self._note("open")
        return super()._open()

    def _sleep(self, level):
        self._note(f"sleep {level}")

    def _wake(self, part):
        self._note(f"wake {part}")

    def _replace_weights(self, weights):
        self._note(f"load {weights.version}")
        return super()._replace_weights(weights)

    def _close(self):
        self.events.append("close")


async def started():
    engine = SlowEngine()
    engine.go.set()
    await engine.ready()
    await engine.load_weights(WEIGHTS)
    engine.events.clear()
    return engine


def within(seconds, coroutine):
    async def limited():
        async with asyncio.timeout(seconds):
            return await coroutine

    return asyncio.run(limited())


def test_sleeps_and_wakes_at_once_take_turns_and_happen_once():
    async def main():
        engine = await started()
        await asyncio.gather(*[engine.sleep() for _ in range(2)], *[engine.wake("weights") for _ in range(3)])
        await asyncio.gather(*[engine.wake("cache") for _ in range(3)])
        await asyncio.gather(exchange(engine, REQUEST), engine.sleep())
        await engine.shutdown()
        return engine.events

    assert within(20, main()) == ["sleep 1", "wake weights", "wake cache", "sleep 1", "close"]


@pytest.mark.parametrize(("under_way", "first"), [(60, (0, 1, 2)), (20, (0, 1)), (8, (0,))])
def test_answers_of_a_step_wait_for_those_of_two_more_until_they_are_not_few(under_way, first):
    lengths = [1, 2, 3, *[5] * (under_way - 3)]
    prompt = np.array([5], np.int32)

    async def main():
        engine = CountingEngine(steps=len(first))
        await engine.ready()
        await engine.load_weights(WEIGHTS)
        requests = [(number, prompt, SamplingParams(length)) for number, length in enumerate(lengths)]
        answers = [await exchange(engine, requests)]
        engine.go_on()
        while sum(map(len, answers)) < under_way:
            answers.append(await exchange(engine))
        await engine.shutdown()
        return answers

    answers = within(20, main())
    assert tuple(number for number, _ in answers[0]) == first
    assert sorted(number for each in answers for number, _ in each) == list(range(under_way))


def test_a_step_that_fails_takes_no_answer_with_it_that_waited_for_the_next():
    async def main():
        engine = CountingEngine(steps=1)
        await engine.ready()
        await engine.load_weights(WEIGHTS)
        requests = [(number, np.array([5], np.int32), SamplingParams(1 + 50 * (number > 0))) for number in range(40)]
        answer = asyncio.create_task(exchange(engine, requests))
        await until(lambda: engine._finished)
        engine.broken = True
        engine.go_on()
        answers = await answer
        if len(answers) < 40:
            answers += await exchange(engine)
        await engine.shutdown()
        return {number for number, answer in answers if isinstance(answer, Response)}, len(answers)

    assert within(20, main()) == ({0}, 40)


def test_every_call_that_waits_at_a_shutdown_is_answered():
    async def main():
        engine = await started()
        engine.go.clear()
        load = asyncio.ensure_future(engine.load_weights(WEIGHTS))
        await until(lambda: engine.events)  # now in the thread
        waiting = [
            load,
            asyncio.ensure_future(engine.load_weights(WEIGHTS)),
            asyncio.ensure_future(engine.sleep()),
            asyncio.ensure_future(engine._in_thread(engine._sleep, 1)),
            asyncio.ensure_future(exchange(engine, REQUEST)),
        ]
        await passes()
        ends = asyncio.ensure_future(engine.shutdown())
        await passes()
        waiting.append(asyncio.ensure_future(engine._in_thread(engine._sleep, 2)))
        engine.go.set()
        found = await asyncio.gather(*waiting, return_exceptions=True)
        await ends
        return engine, found

    engine, found = within(20, main())
    first, *others, exchanged, late = found
    assert first == (4, "c")  # it was under way
    for error in (*others, late):
        assert isinstance(error, EngineError)
        assert "it was shut down" in str(error)
    assert isinstance(dict(exchanged)[0], EngineError)
    assert engine.events == ["load 4", "close"]


@pytest.mark.parametrize("call", ["ready", "weight_version", "load_weights", "sleep", "wake", "exchange"])
def test_a_call_after_the_shutdown_is_refused(call):
    arguments = {"load_weights": (WEIGHTS,), "wake": ("cache",), "exchange": ("client", pickle.dumps(REQUEST))}

    async def main():
        engine = await started()
        await asyncio.gather(engine.shutdown(), engine.shutdown())
        with pytest.raises(EngineError, match="it was shut down"):
            await getattr(engine, call)(*arguments.get(call, ()))

    within(20, main())


@pytest.mark.parametrize(
    ("checksum", "arrangement", "logprob"), [("c", "b", -0.5), ("b", "a", -0.5), ("c", "a", -0.61)]
)
def test_no_request_enters_before_the_weights_are_known_to_be_those_that_were_sent(checksum, arrangement, logprob):
    async def main():
        engine = await started()
        engine._replace_weights = lambda weights: (checksum, arrangement)
        update, answers = await asyncio.gather(
            engine.load_weights(of_text(logprob)),
            exchange(engine, REQUEST),
            return_exceptions=True,
        )
        assert isinstance(update, WeightSyncError)
        assert all(isinstance(answer, EngineError) or answer.weight_version == 4 for _, answer in answers)
        assert await engine.weight_version() == -1
        await engine.shutdown()

    within(20, main())


@pytest.mark.parametrize(("logprob", "agrees"), [(-0.5, True), (-0.59, True), (-0.61, False), (np.nan, True)])
def test_an_engine_that_computes_another_policy_of_the_weights_serves_none_once_it_is_awake(logprob, agrees):
    """Broken weights of the sender, whose log-probabilities are no numbers, are found elsewhere."""

    async def main():
        engine = await started()
        await engine.sleep(2)
        await engine.wake("weights")
        await engine.load_weights(of_text(logprob))
        if agrees:
            await engine.wake("cache")
        else:
            with pytest.raises(
                WeightSyncError, match=r"0\.11 nats per token.*'counting' cannot load .* ModelForCausalLM"
            ):
                await engine.wake("cache")
        assert not agrees or dict(await exchange(engine, REQUEST))[0].weight_version == 5
        assert await engine.weight_version() == (5 if agrees else -1)
        await engine.shutdown()

    within(20, main())
