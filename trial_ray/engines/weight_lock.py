"""Readers-writer lock of the weights: each response is sampled under one version of the weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from trial_ray.engines.protocol import EnginePart
from trial_ray.errors import EngineError


class WeightLock:
    """Readers-writer lock: responses are readers, a weight update is the writer.

    A writer waits for the running responses, which are not aborted; new responses wait for the writer and are sampled under the
    new version. While the engine sleeps, readers are rejected instead of waiting: a caller that sends requests to a sleeping
    engine makes its calls in the wrong order.

    Attributes:
        version: version of the weights; -1 if the engine has no weights.
        asleep: parts that have released their memory; readers are rejected while any part is asleep.
        mutex: must be held to change ``version`` or ``asleep``.
    """

    def __init__(self) -> None:
        self.version = -1
        self.asleep: set[EnginePart] = set()
        self.mutex = asyncio.Lock()
        self._num_readers = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def acquire_read(self, count: int) -> int:
        """Keep the weights fixed for ``count`` responses until :meth:`release_read`; return the version of the weights.

        Raises:
            EngineError: no weights have been loaded yet, or the engine is asleep.
        """
        async with self.mutex:
            if self.asleep:
                raise EngineError("The engine is asleep: its GPU is the learner's until the update has ended.")
            if self.version < 0:
                raise EngineError("The engine has no weights of the learner yet; call load_weights before exchange.")
            self._num_readers += count
            self._idle.clear()
            return self.version

    def release_read(self, count: int) -> None:
        """Release the lock of ``count`` responses that have ended."""
        self._num_readers -= count
        if not self._num_readers:
            self._idle.set()

    @asynccontextmanager
    async def write(self, drain_timeout_s: float) -> AsyncIterator[None]:
        """Wait for the running responses, then exclude new ones inside the context.

        Raises:
            EngineError: the responses did not finish within ``drain_timeout_s`` seconds.
        """
        async with self.mutex:
            try:
                await asyncio.wait_for(self._idle.wait(), drain_timeout_s)
            except TimeoutError as error:
                raise EngineError(
                    f"{self._num_readers} responses did not finish within {drain_timeout_s:.0f} s; the engine must be idle first."
                ) from error
            yield
