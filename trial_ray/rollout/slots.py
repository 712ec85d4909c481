"""Slots of the episodes that an env runner plays at once; older groups get them before younger ones."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class EpisodeSlots:
    """Slots of one event loop.

    Args:
        number: maximum number of episodes that are played at once, over all groups.
    """

    def __init__(self, number: int) -> None:
        self._free = asyncio.Semaphore(number)
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._arrivals = itertools.count()
        self._is_taken = False

    @asynccontextmanager
    async def turn(self, index: int) -> AsyncIterator[None]:
        """Wait until this is the waiting group with the lowest index; no other group gets slots inside the context."""
        if self._is_taken:
            turn = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (index, next(self._arrivals), turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._pass_on()
                raise
        self._is_taken = True
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        """Give the turn to the waiting group with the lowest index."""
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():  # A cancelled group no longer waits.
                turn.set_result(None)
                return
        self._is_taken = False

    async def acquire(self) -> None:
        """Wait for a free slot, and take it."""
        await self._free.acquire()

    def release(self, episode: asyncio.Task[object]) -> None:
        """Free the slot of an episode that has ended."""
        self._free.release()
