"""Engines without a model in this process, for tests of their clients and of the engine actor."""

import asyncio
import pickle
import threading
import time
from types import SimpleNamespace

import numpy as np

from trial_ray.engines.actor import EngineActor
from trial_ray.engines.weights import WeightsChecksum


class CountingEngine(EngineActor):
    """Repeats the first token of the prompt, one token a step, up to the maximum number of tokens.

    Args:
        steps: number of steps after which the engine pauses until :meth:`go_on`; by default more than a test takes.
    """

    def __init__(self, steps=10_000):
        super().__init__(max_model_len=64)
        self.running = []
        self.broken = False
        self._may_step = threading.Semaphore(steps)

    def go_on(self):
        self._may_step.release(10_000)

    def _open(self):
        return {"engine": "counting", "vocab_size": 100}

    def _step(self, joining):
        if self.broken:
            raise ValueError("out of order")
        self.running += joining
        assert self._may_step.acquire(timeout=60)
        time.sleep(0.001)  # Leave time to the event loop.
        for request in self.running:
            request.response_ids.append(int(request.prompt_ids[0]))
            request.logprobs.append(-0.5)
        finished = [r for r in self.running if len(r.response_ids) >= r.params.max_tokens]
        self.running = [r for r in self.running if r not in finished]
        for request in finished:
            request.finish_reason = "length"
        return finished

    def _abort(self, requests):
        self.running = [request for request in self.running if request not in requests]

    def _replace_weights(self, weights):
        return weights.checksum, weights.arrangement

    def _score(self, token_ids):
        return np.full(len(token_ids) - 1, -0.5, np.float32)

    def _sleep(self, level):
        pass

    def _wake(self, part):
        pass

    def _recover(self):
        self.running = []

    def _close(self):
        pass


class Handle:
    """Actor handle whose ``exchange.remote`` calls an engine of this process, fails, or hangs without an engine.

    Attributes:
        served: numbers of the requests that were sent.
        calls: number of calls of ``exchange.remote``.
        aborted: numbers of the requests for which ``abort.remote`` was called.
    """

    def __init__(self, engine=None, error=None):
        self.engine = engine
        self.error = error
        self.served = []
        self.calls = 0
        self.exchange = self
        self.aborted = []
        self.abort_calls = []
        self.abort = SimpleNamespace(remote=self._abort)

    def _abort(self, client, numbers):
        self.aborted += numbers
        if self.engine is not None:
            self.abort_calls.append(asyncio.ensure_future(self.engine.abort(client, numbers)))

    def remote(self, client, batch):
        self.calls += 1
        self.served += [number for number, *_ in pickle.loads(batch)]
        return self._answer(client, batch)

    async def _answer(self, client, batch):
        if self.error:
            raise self.error
        if self.engine is None:
            await asyncio.sleep(60)
        return await self.engine.exchange(client, batch)


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


async def passes(count=20):
    """Run ``count`` passes of the event loop."""
    for _ in range(count):
        await asyncio.sleep(0)


def run(handles, coroutine):
    """Run a coroutine function while the engines of the handles serve weights of version 3."""
    engines = [handle.engine for handle in handles if handle.engine is not None]

    async def main():
        for engine in engines:
            await engine.ready()
            engine._lock.version = 3
        try:
            return await coroutine()
        finally:
            for engine in engines:
                await engine.shutdown()

    return asyncio.run(main())


def digests(named_tensors):
    """Checksum and arrangement with which an engine confirms these tensors."""
    checksum = WeightsChecksum(named_tensors)
    return checksum.hexdigest, checksum.arrangement
