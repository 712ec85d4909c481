"""Engine client: batches requests, validates responses, routes around engines that failed."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from ray import ObjectRef
from ray.actor import ActorHandle

from trial_ray.engines.admission import check_request
from trial_ray.engines.protocol import (
    MOST_IDS,
    InvalidRequestError,
    RequestBatch,
    Response,
    ResponseBatch,
    SamplingParams,
    prompt_digest,
)
from trial_ray.errors import EngineError, first_line, root_cause

FINISH_REASONS = ("stop", "length")
MAX_LOGPROB = 0.01
"""Log-probabilities are at most 0; kernels of low precision round to a little more."""


class WrongAnswerError(EngineError):
    """An engine answered outside its contract; nothing of the answer is used."""


@dataclass(frozen=True, slots=True)
class _Pending:
    """A request that waits: what a response is held against, and who waits for it."""

    prompt_digest: int
    max_tokens: int
    answer: asyncio.Future[Response]


def _fault(response: Response, digest: int, asked: _Pending, vocab_size: int | None) -> str:
    """What is wrong with a response to a prompt of this digest; empty of a valid one."""
    ids, logprobs, highest = response.response_ids, response.logprobs, vocab_size or MOST_IDS
    if digest != asked.prompt_digest:
        return "the engine answered to another prompt"
    if not 1 <= len(ids) <= asked.max_tokens:
        return f"the response has {len(ids)} tokens, expected 1 to {asked.max_tokens}"
    if ids.dtype.kind not in "iu" or logprobs.shape != ids.shape:
        return (
            f"the response has ids of {ids.dtype} and {logprobs.shape} log-probabilities, expected integers, one each"
        )
    if ids.min() < 0 or ids.max() >= highest:
        outside = ids[(ids < 0) | (ids >= highest)][0]
        return f"the response holds token id {outside}, expected 0 to {highest - 1}"
    if not (np.isfinite(logprobs).all() and logprobs.max() <= MAX_LOGPROB):
        found = logprobs[~(np.isfinite(logprobs) & (logprobs <= MAX_LOGPROB))][0]
        return (
            f"the response has a log-probability of {found}, expected a finite number of at most 0. Where every "
            f"response has NaN, weights of version {response.weight_version} give no probabilities: lower lr and continue from "
            "the last checkpoint; where some have it, their prompts overflow the engine's dtype"
        )
    if response.finish_reason not in FINISH_REASONS:
        return f"the response ended by {response.finish_reason!r}, expected one of {FINISH_REASONS}"
    if response.weight_version < 0:
        return f"the response is of weights of version {response.weight_version}, expected 0 or more"
    return ""


SEND_AFTER_S = 0.03
"""A request waits at most so long for others, whose environments step before they ask."""
QUIET_PASSES = 4
"""It waits for this many passes of the event loop in which none is added: an episode that ends starts the next one within three."""


@dataclass(slots=True)
class _Requests:
    """Requests of the coroutines of one event loop: a late answer to another loop finds that loop's own."""

    loop: asyncio.AbstractEventLoop
    pending: dict[int, _Pending] = field(default_factory=dict)
    unsent: list[tuple[int, np.ndarray, SamplingParams]] = field(default_factory=list)
    send_by: float | None = None
    quiet_passes: int = 0
    calls: set[asyncio.Task[None]] = field(default_factory=set)


class EngineLink:
    """Sends requests to one engine and keeps one call waiting there for as long as any is unanswered.

    What the engine answers is compared with what it was asked.

    Args:
        handle: the engine actor.
        vocab_size: of its model; ``None`` does not check token ids against it.

    Attributes:
        groups: number of groups of rollouts that the engine serves from here.
    """

    def __init__(self, handle: ActorHandle[Any], vocab_size: int | None = None) -> None:
        self.groups = 0
        self._handle = handle
        self._vocab_size = vocab_size
        self._name = uuid.uuid4().hex
        self._num_asked = 0
        self._requests: _Requests | None = None

    async def ask(self, prompt_ids: np.ndarray, params: SamplingParams, timeout_s: float) -> Response:
        """Sample one response.

        Raises:
            TimeoutError: there was none after ``timeout_s`` seconds.
            InvalidRequestError: the request itself is wrong, which shows here or at the engine.
            EngineError: the engine refused the request, failed or died.
            WrongAnswerError: it answered outside its contract.
        """
        # Here, where the caller is; in a message it would take the requests of others with it.
        check_request(prompt_ids, params, max_model_len=None, vocab_size=self._vocab_size)
        loop = asyncio.get_running_loop()
        requests = self._requests
        if requests is None or requests.loop is not loop:
            requests = self._requests = _Requests(loop)
        number, answer = self._num_asked, loop.create_future()
        requests.pending[number] = _Pending(prompt_digest(prompt_ids), params.max_tokens, answer)
        self._num_asked += 1
        requests.unsent.append((number, prompt_ids, params))
        self._send_soon(requests)
        expiry = loop.call_later(timeout_s, _expire, answer)
        try:
            response: Response = await answer
            return response
        finally:
            expiry.cancel()
            requests.pending.pop(number, None)

    def _send_soon(self, requests: _Requests) -> None:
        requests.quiet_passes = 0
        if requests.send_by is None:
            requests.send_by = time.monotonic() + SEND_AFTER_S
            requests.loop.call_soon(self._send_when_quiet, requests)
        elif requests.unsent and time.monotonic() > requests.send_by:
            self._send(requests)

    def _send_when_quiet(self, requests: _Requests) -> None:
        """Once in a pass: when no more requests come, send what is left, or ask for answers if no call does."""
        requests.quiet_passes += 1
        if requests.quiet_passes < QUIET_PASSES:
            requests.loop.call_soon(self._send_when_quiet, requests)
            return
        requests.send_by = None
        if requests.unsent or (requests.pending and not requests.calls):
            self._send(requests)

    def _send(self, requests: _Requests) -> None:
        wanted = [request for request in requests.unsent if request[0] in requests.pending]
        requests.unsent = []
        try:
            # Sent now; a task would start only when the pass has ended.
            answers: ObjectRef[ResponseBatch] = self._handle.exchange.remote(self._name, RequestBatch.join(wanted))
        except Exception as error:  # of Ray's, for one: nothing would answer these
            _fail_pending(requests, error)
            return
        requests.calls.add(asyncio.ensure_future(self._receive(requests, answers)))
        if requests.send_by is not None:
            requests.send_by = time.monotonic() + SEND_AFTER_S

    async def _receive(self, requests: _Requests, call: Awaitable[ResponseBatch]) -> None:
        try:
            self._deliver(requests, await call)
        except Exception as error:  # whatever it is, it reaches those who wait
            _fail_pending(requests, root_cause(error))
        finally:
            requests.calls.discard(asyncio.current_task())

    def _deliver(self, requests: _Requests, answers: ResponseBatch) -> None:
        """Hand on what was answered; with one wrong response, none of its message is taken: all may be shifted.

        Raises:
            WrongAnswerError: its parts do not belong together, or it holds an answer that was never asked for.
        """
        if unknown := [number for number in (*answers.numbers, *answers.failed) if not 0 <= number < self._num_asked]:
            raise WrongAnswerError(f"the engine answered to request {unknown[0]}, which was never sent")
        counts = {len(answers.numbers), len(answers.lengths), len(answers.prompt_digests)}
        if len(counts) > 1 or not sum(answers.lengths) == len(answers.response_ids) == len(answers.logprobs):
            raise WrongAnswerError(
                "the parts of the engine's message belong to different numbers of responses or tokens"
            )
        answered = [
            (requests.pending[number], response, digest)
            for (number, response), digest in zip(answers.split(), answers.prompt_digests, strict=True)
            if number in requests.pending  # else its caller has stopped waiting
        ]
        faults = [_fault(response, digest, pending, self._vocab_size) for pending, response, digest in answered]
        wrong = next(filter(None, faults), "")
        for pending, response, _ in answered:
            if wrong:
                _fail(pending.answer, WrongAnswerError(wrong))
            elif not pending.answer.done():
                pending.answer.set_result(response)
        for number, error in answers.failed.items():
            if number in requests.pending:
                _fail(requests.pending[number].answer, error)
        # After the coroutines that were answered: they act, and most ask again.
        self._send_soon(requests)


def _fail_pending(requests: _Requests, cause: BaseException) -> None:
    requests.unsent.clear()  # they go elsewhere, too
    for pending in requests.pending.values():
        _fail(pending.answer, cause)


def _fail(answer: asyncio.Future[Response], cause: BaseException) -> None:
    if not answer.done():
        error = cause if isinstance(cause, EngineError) else EngineError(f"{type(cause).__name__}: {cause}")
        answer.set_exception(error)


def _expire(answer: asyncio.Future[Response]) -> None:
    if not answer.done():
        answer.set_exception(TimeoutError())


ATTEMPTS = 3
"""Different engines that are tried for one request, at most."""


@dataclass(slots=True)
class RequestCounts:
    """Counts of a client's requests; running ones are in ``requests_sent`` alone.

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
                return await links[index].ask(prompt_ids, params, left / (attempts - attempt))
            except InvalidRequestError:
                raise
            except (EngineError, TimeoutError) as error:
                self.counts.attempts_failed += 1
                failures.append(f"engine {index}: {type(error).__name__}: {first_line(error)}")
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
