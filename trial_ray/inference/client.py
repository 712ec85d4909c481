"""What rollouts hold of the engines: where a request goes, and where next when that engine fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ray.actor import ActorHandle

from trial_ray.errors import EngineError
from trial_ray.inference.link import EngineLink
from trial_ray.inference.protocol import InvalidRequestError, Response, SamplingParams

ATTEMPTS = 3
"""Different engines that are tried for one request, at most."""


@dataclass(slots=True)
class RequestCounts:
    """What became of the requests of a client; those under way are in none but the first.

    Attributes:
        requests_sent: asked for, each once, however many engines were tried.
        requests_answered: by some engine.
        requests_failed: by every engine that was tried, or refused as wrong, or given up by who asked.
        attempts_failed: at one engine, after which another may have answered.
    """

    requests_sent: int = 0
    requests_answered: int = 0
    requests_failed: int = 0
    attempts_failed: int = 0


class EngineClient:
    """Sends each request to one of the engines, and to the next one when that fails.

    Requests with the same affinity (a group of rollouts) go to the same engine, whose prefix cache then serves them. A new
    group goes to the engine that serves the fewest groups from here; :meth:`end_group` says that it is over.

    Args:
        handles: engine actors, as from ``EnginePool.handles``.
        timeout_s: deadline of one request over all attempts, in seconds; each attempt has an equal share of what is left.
        vocab_size: of the engines' model, which bounds the token ids that are taken from them; ``None`` takes any.

    Attributes:
        counts: of requests so far.
    """

    def __init__(
        self, handles: Sequence[ActorHandle[Any]], *, timeout_s: float = 600.0, vocab_size: int | None = None
    ) -> None:
        self._timeout_s = timeout_s
        self._vocab_size = vocab_size
        self.counts = RequestCounts()
        self.replace_handles(handles)

    def replace_handles(self, handles: Sequence[ActorHandle[Any]]) -> None:
        """Use these engines from now on (after a restart)."""
        if not handles:
            raise EngineError("handles: no engine given, at least one expected")
        self._links = [EngineLink(handle, self._vocab_size) for handle in handles]
        self._group_engine: dict[Hashable, int] = {}

    async def generate(
        self, prompt_ids: np.ndarray, params: SamplingParams, affinity: Hashable, preferred: int = 0
    ) -> Response:
        """Sample one response.

        Args:
            prompt_ids: int ``[P]``.
            params: how to sample.
            affinity: of the group.
            preferred: where the search for the least busy engine starts, modulo their number. Clients in several processes,
                none of which knows the others' groups, spread them evenly when the groups of all are numbered through.

        Raises:
            InvalidRequestError: the request itself is wrong.
            EngineError: every attempt failed or the deadline passed; the message holds each attempt's reason.
        """
        self.counts.requests_sent += 1
        try:
            response = await self._generate(prompt_ids, params, affinity, preferred)
        except BaseException:
            self.counts.requests_failed += 1
            raise
        self.counts.requests_answered += 1
        return response

    async def _generate(
        self, prompt_ids: np.ndarray, params: SamplingParams, affinity: Hashable, preferred: int
    ) -> Response:
        links, deadline = self._links, time.monotonic() + self._timeout_s
        first = self._engine_of(affinity, preferred)
        failures: list[str] = []
        attempts = min(ATTEMPTS, len(links))
        for attempt in range(attempts):
            index = (first + attempt) % len(links)
            left = deadline - time.monotonic()
            if left <= 0:
                break
            try:
                # A share of what is left, so that an engine that hangs leaves time for the others.
                async with asyncio.timeout(left / (attempts - attempt)):
                    return await links[index].ask(prompt_ids, params)
            except InvalidRequestError:
                raise
            except (EngineError, TimeoutError) as error:
                self.counts.attempts_failed += 1
                failures.append(f"engine {index}: {type(error).__name__}: {_first_line(error)}")
        raise EngineError(
            f"no engine answered ({len(failures)} of {len(links)} tried, deadline {self._timeout_s:.0f} s): "
            + "; ".join(failures)
        )

    def end_group(self, affinity: Hashable) -> None:
        """Nothing more will be asked for with this affinity."""
        index = self._group_engine.pop(affinity, None)
        if index is not None:
            self._links[index].groups -= 1

    def _engine_of(self, affinity: Hashable, preferred: int) -> int:
        if affinity not in self._group_engine:
            order = [(preferred + offset) % len(self._links) for offset in range(len(self._links))]
            index = min(order, key=lambda index: self._links[index].groups)  # the first of the least busy
            self._links[index].groups += 1
            self._group_engine[affinity] = index
        return self._group_engine[affinity]


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or "no message").splitlines()[0]
