"""State of a request inside an engine, and the usage that finished requests add up to; lock of the weights."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from random import Random

import numpy as np

from trial_ray.engines.protocol import EnginePart, Response, SamplingParams
from trial_ray.errors import EngineError


@dataclass(eq=False)
class Request:
    """State of one request while its response is sampled.

    Attributes:
        prompt_ids: int ``[P]``.
        params: sampling parameters.
        reply: callback that receives the response, or an error instead.
        weight_version: version of the weights that sample the response.
        response_ids: tokens sampled so far; ``logprobs`` has one entry for each.
        finish_reason: ``""`` while the request runs.
        cached_tokens: number of prompt tokens that the engine had computed before; ``None`` if the engine does not report it.
        aborted: whether the client no longer waits for the response.
    """

    prompt_ids: np.ndarray
    params: SamplingParams
    reply: Callable[[Response | EngineError], None] = lambda answer: None
    weight_version: int = 0
    response_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""
    cached_tokens: int | None = None
    aborted: bool = False

    @cached_property
    def random(self) -> Random:
        """Random number generator of this request."""
        return Random(None if self.params.seed is None else int(self.params.seed))

    def append(self, token: int, logprob: float, stop_ids: frozenset[int]) -> None:
        """Append one sampled token and set ``finish_reason`` if the token ends the response."""
        self.response_ids.append(token)
        self.logprobs.append(logprob)
        if not math.isfinite(logprob):
            self.finish_reason = "overflow"
        elif token in stop_ids:
            self.finish_reason = "stop"
        elif len(self.response_ids) >= self.params.max_tokens:
            self.finish_reason = "length"

    @property
    def overflow(self) -> str:
        """Error message if some token has no finite log-probability, because the model overflowed; empty otherwise."""
        for logprob in self.logprobs:
            if not math.isfinite(logprob):
                return f"the model gives a log-probability of {logprob} after a prompt of {len(self.prompt_ids)} tokens"
        return ""

    def response(self) -> Response:
        """Return the finished response.

        Raises:
            EngineError: the model overflowed.
        """
        if self.overflow:
            raise EngineError(self.overflow)
        return Response(
            response_ids=np.asarray(self.response_ids, np.int32),
            logprobs=np.asarray(self.logprobs, np.float32),
            weight_version=self.weight_version,
            finish_reason=self.finish_reason,
        )


def overflow_error(request: Request, version_answers: bool) -> EngineError:
    """Return the error of a request in which the model overflowed.

    Args:
        request: the request.
        version_answers: whether the same weights have answered another prompt.
    """
    overflow, version = request.overflow, request.weight_version
    wider = "set a dtype of wider range in engine_kwargs ('bfloat16', 'float32')"
    if version_answers:
        return EngineError(
            f"{overflow}: the prompt overflows, because weights of version {version} answered other prompts; {wider}"
        )
    return EngineError(
        f"{overflow}, and weights of version {version} have answered no other prompt yet. If every prompt fails, the weights are "
        f"broken: lower lr and continue from the last checkpoint. If others are answered, the prompt overflows: {wider}"
    )


@dataclass
class EngineUsage:
    """Usage of an engine, in training and evaluation.

    Attributes:
        busy_seconds: time in steps, with at least one request running.
        prompt_tokens: prompt tokens of finished requests.
        cached_tokens: prompt tokens that the engine had computed before; ``None`` if the engine does not report them.
        response_tokens: sampled tokens of finished requests.
    """

    busy_seconds: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    response_tokens: int = 0

    def add(self, finished: list[Request], seconds: float) -> None:
        """Count a step of ``seconds`` seconds and the requests that finished in it."""
        self.busy_seconds += seconds
        for request in finished:
            self.prompt_tokens += len(request.prompt_ids)
            self.response_tokens += len(request.response_ids)
            if request.cached_tokens is not None:
                self.cached_tokens = (self.cached_tokens or 0) + request.cached_tokens


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
