"""Engine client: routes each request to an engine, and to another one if that engine fails."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from trial_ray.engines.link import EngineLink, Engines
from trial_ray.engines.protocol import InvalidRequestError, Response, SamplingParams
from trial_ray.errors import EngineError, first_line

MAX_ATTEMPTS = 3
"""Maximum number of different engines that are tried for one request."""


@dataclass
class RequestCounts:
    """Counts of a client's requests; running requests are counted only in ``requests_sent``.

    Attributes:
        requests_sent: number of requests, each counted once, however many engines were tried.
        requests_answered: requests answered by some engine.
        requests_failed: requests that failed at every engine tried, were rejected as invalid, or were cancelled by the caller.
        attempts_failed: failed attempts at one engine; another engine may have answered afterwards.
    """

    requests_sent: int = 0
    requests_answered: int = 0
    requests_failed: int = 0
    attempts_failed: int = 0


class EngineClient:
    """Sends each request to one of the engines, and to the next engine if the first fails or does not answer in time.

    Requests with the same affinity (a group of rollouts) go to the same engine and reuse its prefix cache. A new group goes to
    the engine that serves the fewest groups of this client; :meth:`end_group` marks the end of a group.

    Args:
        handles: engine actors, as from ``EnginePool.handles``.
        timeout_s: deadline of one request over all attempts, in seconds; each attempt gets an equal share of the remaining time.
        owner: id of the actor that uses this client, by which ``EnginePool.abort`` ends the requests of a lost actor; empty if
            the client belongs to no actor.

    Attributes:
        counts: numbers of generation requests so far, by outcome.
    """

    def __init__(self, handles: Engines, *, timeout_s: float = 600.0, owner: str = "") -> None:
        self._timeout_s = timeout_s
        self._owner = owner
        self._loop: asyncio.AbstractEventLoop | None = None
        self.counts = RequestCounts()
        self.replace_handles(handles)

    def replace_handles(self, handles: Engines) -> None:
        """Send further requests to these engines, for example after a restart; groups are assigned to engines again."""
        self._handles = handles
        self._links = [EngineLink(handle, self._owner) for handle in handles]
        self._group_engine: dict[Hashable, int] = {}

    async def generate(
        self, prompt_ids: np.ndarray, params: SamplingParams, affinity: Hashable, preferred: int = 0
    ) -> Response:
        """Sample one response.

        Args:
            prompt_ids: token ids of the prompt, int ``[P]``.
            params: sampling parameters.
            affinity: key of the group of rollouts to which the request belongs.
            preferred: index at which the search for the least busy engine starts, modulo the number of engines. Clients do
                not see each other's groups; groups are spread evenly if ``preferred`` counts the groups of all clients.

        Raises:
            InvalidRequestError: the request itself is invalid.
            EngineError: every attempt failed or the deadline passed; the message contains the reason of each attempt.
        """
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # Create new links, because an EngineLink works in only one event loop.
            self._loop = loop
            self.replace_handles(self._handles)
        self.counts.requests_sent += 1
        try:
            response = await self._generate(prompt_ids, params, self._engine_of(affinity, preferred))
        except BaseException:
            self.counts.requests_failed += 1
            raise
        self.counts.requests_answered += 1
        return response

    async def _generate(self, prompt_ids: np.ndarray, params: SamplingParams, first: int) -> Response:
        links, deadline = self._links, time.monotonic() + self._timeout_s
        failures: list[str] = []
        attempts = min(MAX_ATTEMPTS, len(links))
        for attempt in range(attempts):
            index = (first + attempt) % len(links)
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                break
            try:
                # Divide the remaining time among the attempts, so that an engine that hangs leaves time for other engines.
                return await links[index].generate(prompt_ids, params, remaining_s / (attempts - attempt))
            except InvalidRequestError:
                raise
            except (EngineError, TimeoutError) as error:
                self.counts.attempts_failed += 1
                failures.append(f"engine {index}: {type(error).__name__}: {first_line(error)}")
        raise EngineError(
            f"No engine answered ({len(failures)} of {len(links)} tried, deadline {self._timeout_s:.0f} s): "
            + "; ".join(failures)
        )

    def end_group(self, affinity: Hashable) -> None:
        """Forget the engine of the rollout group ``affinity``; call this after its last request."""
        self._group_engine.pop(affinity, None)

    def _engine_of(self, affinity: Hashable, preferred: int) -> int:
        if not self._links:
            raise EngineError("No engine is left, and no replacement has started yet.")
        if affinity not in self._group_engine:
            num_groups, count = Counter(self._group_engine.values()), len(self._links)
            order = [(preferred + offset) % count for offset in range(count)]
            self._group_engine[affinity] = min(order, key=num_groups.__getitem__)
        return self._group_engine[affinity]
