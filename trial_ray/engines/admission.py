"""Requests inside an engine: checked when they arrive, answered in batches."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np

from trial_ray.engines.protocol import (
    MOST_IDS,
    InvalidRequestError,
    Response,
    ResponseBatch,
    SamplingParams,
    is_whole,
    prompt_digest,
)
from trial_ray.errors import EngineError

#: vLLM raises any lower temperature than this, 0 apart, without saying so in its response.
MIN_TEMPERATURE = 0.01
MOST_SEEDS = 2**63
"""torch's generators take no larger one."""


@dataclass(eq=False)
class Request:
    """One response in the making.

    Attributes:
        prompt_ids: int ``[P]``.
        params: how to sample.
        response_ids: tokens sampled so far, with ``logprobs`` beside them.
        finish_reason: ``""`` while it runs.
        cached_tokens: tokens of the prompt that the engine had computed before; ``None`` where it does not tell.
    """

    prompt_ids: np.ndarray
    params: SamplingParams
    response_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""
    cached_tokens: int | None = None

    @property
    def fault(self) -> str:
        """Why there is no response: some token has no probability, because the model overflowed; empty where each has one."""
        wrong = next((logprob for logprob in self.logprobs if not math.isfinite(logprob)), None)
        if wrong is None:
            return ""
        return f"the model gives a log-probability of {wrong} after a prompt of {len(self.prompt_ids)} tokens"

    def response(self, weight_version: int) -> Response:
        """The finished response, as sampled by weights of this version.

        Raises:
            EngineError: it has a :attr:`fault`.
        """
        if fault := self.fault:
            raise EngineError(fault)
        return Response(
            response_ids=np.asarray(self.response_ids, np.int32),
            logprobs=np.asarray(self.logprobs, np.float32),
            weight_version=weight_version,
            finish_reason=self.finish_reason,
        )


@dataclass
class EngineUsage:
    """Usage of an engine, in training and evaluation.

    Attributes:
        busy_seconds: time in steps, while at least one request was under way.
        prompt_tokens: of finished requests.
        cached_tokens: those of them that the engine had computed before; ``None`` where it does not tell.
        response_tokens: sampled.
    """

    busy_seconds: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    response_tokens: int = 0

    def add(self, finished: list[Request], seconds: float) -> None:
        """Count a step of so many seconds, and the requests that ended with it."""
        self.busy_seconds += seconds
        for request in finished:
            self.prompt_tokens += len(request.prompt_ids)
            self.response_tokens += len(request.response_ids)
            if request.cached_tokens is not None:
                self.cached_tokens = (self.cached_tokens or 0) + request.cached_tokens


class AdmissionGate:
    """Keeps responses and weight updates apart, so that a whole response is sampled under one version.

    An update closes the gate, waits for the responses under way to finish (they are not aborted), changes the weights
    and opens the gate; requests that came meanwhile wait in front of it and are sampled under the new version.
    While the engine sleeps they are refused: who sends one then works in the wrong order, and would wait for an update.
    """

    def __init__(self) -> None:
        self.version = -1
        self.asleep = False
        self._in_flight = 0
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()

    async def enter(self, count: int) -> int:
        """Hold the weights still for ``count`` responses, until :meth:`leave`; returns their version.

        Raises:
            EngineError: no weights were loaded yet, or the engine sleeps.
        """
        await self._until_open()
        if self.asleep:
            raise EngineError("the engine is asleep: its GPU is the learner's until the update has ended")
        if self.version < 0:
            raise EngineError("the engine holds no weights of the learner yet; call load_weights before exchange")
        self._in_flight += count
        self._idle.clear()
        return self.version

    def leave(self, count: int) -> None:
        """So many responses have finished."""
        self._in_flight -= count
        if not self._in_flight:
            self._idle.set()

    @asynccontextmanager
    async def update(self, version: int, *, drain_timeout_s: float) -> AsyncIterator[None]:
        """Hold back requests while weights change; adopts ``version`` only when the block succeeds.

        A failed update leaves the engine without a version: its weights are then unknown.

        Raises:
            EngineError: the responses under way did not finish within ``drain_timeout_s`` seconds.
        """
        async with self._held(drain_timeout_s):
            self.version = -1
            yield
            self.version = version

    @asynccontextmanager
    async def sleep(self, *, drain_timeout_s: float) -> AsyncIterator[None]:
        """Hold back requests while the block frees the engine's memory; refuse them from then on, until ``asleep`` is unset.

        Raises:
            EngineError: the responses under way did not finish within ``drain_timeout_s`` seconds.
        """
        async with self._held(drain_timeout_s):
            self.asleep = True
            yield

    @asynccontextmanager
    async def _held(self, drain_timeout_s: float) -> AsyncIterator[None]:
        await self._until_open()
        self._open.clear()
        try:
            await self._drain(drain_timeout_s)
            yield
        finally:
            self._open.set()

    async def _until_open(self) -> None:
        # Another coroutine may have closed it again in the meantime.
        while not self._open.is_set():
            await self._open.wait()

    async def _drain(self, timeout_s: float) -> None:
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError as error:
            raise EngineError(
                f"{self._in_flight} responses did not finish within {timeout_s:.0f} s; the engine must be idle first"
            ) from error


def check_request(
    prompt_ids: np.ndarray, params: SamplingParams, *, max_model_len: int | None, vocab_size: int | None
) -> None:
    """Refuse a request that no engine of this model could serve.

    Args:
        prompt_ids: of the prompt.
        params: how to sample.
        max_model_len: most tokens of prompt and response; ``None`` where it is not known.
        vocab_size: token ids are below it; ``None`` where it is not known.

    Raises:
        InvalidRequestError: an empty prompt, ids outside the vocabulary, no room for ``max_tokens``, or a sampling
            value of another type or out of range.
    """
    _check_params(params)
    if not isinstance(prompt_ids, np.ndarray) or prompt_ids.ndim != 1:
        raise InvalidRequestError(f"prompt_ids: {prompt_ids!r:.80} found, an array [P] expected")
    if not (length := len(prompt_ids)):
        raise InvalidRequestError("prompt_ids: empty, at least one token expected")
    if prompt_ids.dtype.kind not in "iu":
        raise InvalidRequestError(f"prompt_ids: {prompt_ids.dtype} found, an integer type expected")
    if max_model_len is not None and length + params.max_tokens > max_model_len:
        raise InvalidRequestError(
            f"prompt of {length} tokens and a response of up to {params.max_tokens} exceed max_model_len={max_model_len}; "
            "shorten the prompt, lower max_tokens or raise the engine's max_model_len"
        )
    vocab_size = vocab_size or MOST_IDS
    if prompt_ids.min() < 0 or prompt_ids.max() >= vocab_size:
        raise InvalidRequestError(f"prompt_ids: values outside [0, {vocab_size}) found")


def _check_params(params: SamplingParams) -> None:
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError(f"params: SamplingParams expected, {type(params).__name__} found")
    if not is_whole(params.max_tokens) or params.max_tokens < 1:
        raise InvalidRequestError(f"max_tokens: {params.max_tokens!r} found, a whole number of 1 or more expected")
    if params.seed is not None and not (is_whole(params.seed) and 0 <= params.seed < MOST_SEEDS):
        raise InvalidRequestError(f"seed: {params.seed!r} found, None or a whole number in [0, 2**63) expected")
    known = all(
        isinstance(value, (int, float)) and math.isfinite(value) for value in (params.temperature, params.top_p)
    )
    tempered = known and (params.temperature == 0 or params.temperature >= MIN_TEMPERATURE)
    if not tempered or not 0 < params.top_p <= 1:
        raise InvalidRequestError(
            f"temperature={params.temperature!r}, top_p={params.top_p!r} found; "
            f"a temperature of 0 or at least {MIN_TEMPERATURE}, and top_p in (0, 1] expected"
        )


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
