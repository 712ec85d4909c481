"""What rollouts hold of the engines: where a request goes, and where next when that engine fails."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError

from trial_ray.errors import EngineError
from trial_ray.inference.protocol import InvalidRequestError, Response, SamplingParams

ATTEMPTS = 3
"""Different engines that are tried for one request, at most."""


class EngineClient:
    """Sends each request to one of the engines, and to the next one when that fails.

    Requests with the same affinity (a group of rollouts) go to the same engine, whose prefix cache then serves them.

    Args:
        handles: engine actors, as from ``EnginePool.handles``.
        timeout_s: deadline of one request over all attempts, in seconds.
    """

    def __init__(self, handles: Sequence[ActorHandle[Any]], *, timeout_s: float = 600.0) -> None:
        self._timeout_s = timeout_s
        self.replace_handles(handles)

    def replace_handles(self, handles: Sequence[ActorHandle[Any]]) -> None:
        """Use these engines from now on (after a restart)."""
        if not handles:
            raise EngineError("handles: no engine given, at least one expected")
        self._handles = list(handles)

    async def generate(self, prompt_ids: np.ndarray, params: SamplingParams, affinity: str | int) -> Response:
        """Sample one response.

        Args:
            prompt_ids: int ``[P]``.
            params: how to sample.
            affinity: chooses the engine, the same on every host.

        Raises:
            InvalidRequestError: the request itself is wrong.
            EngineError: every attempt failed or the deadline passed; the message holds each attempt's reason.
        """
        first = zlib.crc32(str(affinity).encode())
        deadline = time.monotonic() + self._timeout_s
        failures: list[str] = []
        handles = self._handles
        for attempt in range(min(ATTEMPTS, len(handles))):
            index = (first + attempt) % len(handles)
            left = deadline - time.monotonic()
            if left <= 0:
                break
            try:
                return await asyncio.wait_for(_call(handles[index], prompt_ids, params), left)
            except (RayTaskError, RayActorError, TimeoutError) as error:
                cause = error.cause if isinstance(error, RayTaskError) else error
                if isinstance(cause, InvalidRequestError):
                    raise cause from None
                failures.append(f"engine {index}: {type(cause).__name__}: {_first_line(cause)}")
        raise EngineError(
            f"no engine answered ({len(failures)} of {len(handles)} tried, deadline {self._timeout_s:.0f} s): "
            + "; ".join(failures)
        )


async def _call(handle: ActorHandle[Any], prompt_ids: np.ndarray, params: SamplingParams) -> Response:
    response: Response = await handle.generate.remote(prompt_ids, params)
    return response


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or "no message").splitlines()[0]
