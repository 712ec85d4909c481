"""Play groups of an env runner in a background thread, so its actor keeps answering calls."""

from __future__ import annotations

import asyncio
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from trial_ray.rollout.groups import GroupRequest, SampleSettings
from trial_ray.rollout.trajectory import Trajectory, TrajectoryGroup

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
        self._slots = asyncio.Semaphore(max_episodes_in_flight)
        self._stop = asyncio.Event()
        running: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(target=self._run, args=(running,), name="groups", daemon=True)
        self._thread.start()
        self._loop = running.result()

    def begin(self, requests: Sequence[GroupRequest], settings: SampleSettings) -> None:
        """Start playing the requests after all earlier ones, and return immediately."""
        playing = asyncio.run_coroutine_threadsafe(self._play_groups(requests, settings), self._loop)
        playing.add_done_callback(self._note_error)

    async def _play_groups(self, requests: Sequence[GroupRequest], settings: SampleSettings) -> None:
        """Start the rollouts one after the other, so that engines work on the first while later environments still load."""
        groups = []
        try:
            for request in requests:
                rollouts = []
                for rollout in range(request.group_size):
                    await self._slots.acquire()
                    playing = self._play(request, rollout, settings)
                    rollouts.append(asyncio.create_task(playing, name=f"group {request.index} rollout {rollout}"))
                    rollouts[-1].add_done_callback(lambda _: self._slots.release())
                    await asyncio.sleep(0)
                groups.append(asyncio.create_task(self._end_group(request, rollouts)))
            await asyncio.gather(*groups)
        finally:  # also of a group that is abandoned while its rollouts wait for slots, before the task that ends it runs
            for request in requests:
                self._end(request)

    async def _end_group(self, request: GroupRequest, rollouts: Sequence[asyncio.Task[Trajectory]]) -> None:
        try:
            group = TrajectoryGroup(request.task_id, await asyncio.gather(*rollouts))
        finally:  # also of a group that fails
            self._end(request)
        self._ended.put((request, group))

    def wait(self, timeout_s: float, number: int = 1) -> int:
        """Wait until ``number`` groups are ready for :meth:`take`, at most ``timeout_s`` seconds; return their number.

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

    def take(self) -> list[Played]:
        """Return the groups that have ended since the last call; errors as in :meth:`wait`."""
        self.wait(0.0, sys.maxsize)
        taken, self._waited_for = self._waited_for, []
        return taken

    def close(self) -> None:
        """Cancel the unfinished rollouts and stop the thread."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning("an environment did not return within %.0f s; its thread is left behind", STOP_TIMEOUT_S)

    def _run(self, running: Future[asyncio.AbstractEventLoop]) -> None:
        # Leaving the runner cancels what is still played, and gives its environments back.
        with asyncio.Runner() as runner:
            running.set_result(runner.get_loop())
            runner.run(self._stop.wait())

    def _note_error(self, playing: Future[Any]) -> None:
        if not playing.cancelled() and (error := playing.exception()) is not None:
            self._ended.put(error)
