"""Play groups of an env runner in a background thread, so its actor keeps answering calls."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from trial_ray.rollout.groups import GroupRequest, SampleSettings
from trial_ray.trajectory import Trajectory, TrajectoryGroup

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 30.0
"""Seconds to wait for the thread to end; only an environment call that does not return takes longer."""

Played = tuple[GroupRequest, TrajectoryGroup]
Play = Callable[[GroupRequest, int, SampleSettings], Coroutine[Any, Any, Trajectory]]
"""Plays one rollout of a request; the second argument is the rollout's index."""


class BackgroundGroups:
    """Plays groups in an event loop in a daemon thread, and collects the groups that have ended.

    Args:
        play: plays one rollout.
        end: called with a request when none of its rollouts is played any more.
        max_episodes_in_flight: maximum number of rollouts that are played at once, over all groups.
    """

    def __init__(self, play: Play, end: Callable[[GroupRequest], None], max_episodes_in_flight: int) -> None:
        self._play = play
        self._end = end
        self._ended: queue.SimpleQueue[Played | BaseException] = queue.SimpleQueue()
        self._waited_for: list[Played] = []
        self._waiting: list[tuple[int, int, GroupRequest, SampleSettings]] = []
        self._numbers = itertools.count()
        self._added = asyncio.Event()
        self._slots = asyncio.Semaphore(max_episodes_in_flight)
        self._stop = asyncio.Event()
        running: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(target=self._run, args=(running,), name="groups", daemon=True)
        self._thread.start()
        self._loop = running.result()

    def begin(self, requests: Sequence[GroupRequest], settings: SampleSettings) -> None:
        """Add requests to those that are played, and return immediately; requests with lower indices start earlier."""
        self._loop.call_soon_threadsafe(self._add, requests, settings)

    def _add(self, requests: Sequence[GroupRequest], settings: SampleSettings) -> None:
        for request in requests:
            heapq.heappush(self._waiting, (request.index, next(self._numbers), request, settings))
        self._added.set()

    async def _start_groups(self) -> None:
        """Start one group after another, the oldest first, so that engines work while later environments still load."""
        playing: set[asyncio.Task[None]] = set()  # the event loop itself keeps only weak references
        while True:
            while not self._waiting:
                self._added.clear()
                await self._added.wait()
            _, _, request, settings = heapq.heappop(self._waiting)
            begun = asyncio.Event()
            group = asyncio.create_task(self._play_group(request, settings, begun))
            playing.add(group)
            group.add_done_callback(playing.discard)
            await begun.wait()

    async def _play_group(self, request: GroupRequest, settings: SampleSettings, begun: asyncio.Event) -> None:
        """Play a group; ``begun`` is set when each of its rollouts has a slot."""
        try:
            rollouts: list[asyncio.Task[Trajectory]] = []
            for rollout in range(request.group_size):
                await self._slots.acquire()
                playing = self._play(request, rollout, settings)
                rollouts.append(asyncio.create_task(playing, name=f"group {request.index} rollout {rollout}"))
                rollouts[-1].add_done_callback(lambda _: self._slots.release())
                await asyncio.sleep(0)
            begun.set()
            self._ended.put((request, TrajectoryGroup(request.task_id, await asyncio.gather(*rollouts))))
        except Exception as error:  # the next call of wait() raises it
            self._ended.put(error)
        finally:
            begun.set()
            self._end(request)

    def wait(self, timeout_s: float, number: int = 1) -> int:
        """Wait until ``number`` groups have ended and were not taken, at most ``timeout_s`` seconds; return their number.

        Raises:
            Exception: the exception that a rollout raised, an error of this package's code or its configuration.
        """
        deadline = time.monotonic() + timeout_s
        with suppress(queue.Empty):
            while len(self._waited_for) < number:
                ended = self._ended.get(timeout=max(0.0, deadline - time.monotonic()))
                if isinstance(ended, BaseException):
                    raise ended
                self._waited_for.append(ended)
        return len(self._waited_for)

    def take(self, number: int) -> list[Played]:
        """Return and forget the first ``number`` groups that :meth:`wait` has counted."""
        taken, self._waited_for = self._waited_for[:number], self._waited_for[number:]
        return taken

    def close(self) -> None:
        """Cancel the unfinished rollouts and stop the thread."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning("an environment did not return within %.0f s; its thread is left behind", STOP_TIMEOUT_S)

    def _run(self, running: Future[asyncio.AbstractEventLoop]) -> None:
        async def serve() -> None:
            starting = asyncio.create_task(self._start_groups())
            await self._stop.wait()
            starting.cancel()

        # Leaving the runner cancels what is still played, and gives its environments back.
        with asyncio.Runner() as runner:
            running.set_result(runner.get_loop())
            runner.run(serve())
