"""What an engine has finished and a client has not fetched yet."""

from __future__ import annotations

import asyncio
import time

import numpy as np

from trial_ray.errors import EngineError
from trial_ray.inference.protocol import Response, ResponseBatch, prompt_digest

FETCH_TIMEOUT_S = 60.0
"""After so long a client is answered with nothing, and asks again."""
FORGET_AFTER_S = 600.0
"""A client that did not fetch for so long is gone, and what was finished for it is dropped."""


class Outbox:
    """Responses of one client, from the step in which each finished to the client's next call."""

    def __init__(self) -> None:
        self._finished: list[tuple[int, int, Response]] = []
        self._failed: dict[int, EngineError] = {}
        self._waiting: asyncio.Future[None] | None = None
        self._asked_at = time.monotonic()

    @property
    def abandoned(self) -> bool:
        """Whether the client has not called for too long."""
        return self._waiting is None and time.monotonic() - self._asked_at > FORGET_AFTER_S

    def put(self, number: int, prompt_ids: np.ndarray, response: Response) -> None:
        """A request was answered."""
        self._finished.append((number, prompt_digest(prompt_ids), response))
        self._wake()

    def fail(self, number: int, error: EngineError) -> None:
        """A request will not be answered."""
        self._failed[number] = error
        self._wake()

    async def take(self) -> ResponseBatch:
        """Everything that has finished, once there is something; nothing when the client calls again before that."""
        self._wake()
        self._asked_at = time.monotonic()
        if not self._finished and not self._failed:
            await self._wait()
        finished, failed = self._finished, self._failed
        self._finished, self._failed = [], {}
        return _join(finished, failed)

    async def _wait(self) -> None:
        waiting = self._waiting = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(FETCH_TIMEOUT_S):
                await waiting
        except TimeoutError:
            pass
        finally:
            if self._waiting is waiting:
                self._waiting = None

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_result(None)


def _join(finished: list[tuple[int, int, Response]], failed: dict[int, EngineError]) -> ResponseBatch:
    responses = [response for _, _, response in finished]
    return ResponseBatch(
        numbers=tuple(number for number, _, _ in finished),
        response_ids=np.concatenate([np.empty(0, np.int32), *(response.response_ids for response in responses)]),
        logprobs=np.concatenate([np.empty(0, np.float32), *(response.logprobs for response in responses)]),
        lengths=tuple(len(response.response_ids) for response in responses),
        weight_versions=tuple(response.weight_version for response in responses),
        finish_reasons=tuple(response.finish_reason for response in responses),
        prompt_digests=tuple(digest for _, digest, _ in finished),
        failed=failed,
    )
