"""Engine client: batches requests, validates responses, routes around engines that failed."""

from __future__ import annotations

import asyncio
import pickle
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RaySystemError

from trial_ray.engines.admission import check_request
from trial_ray.engines.protocol import MOST_IDS, InvalidRequestError, Response, SamplingParams, SentAnswer, SentRequest
from trial_ray.errors import EngineError, first_line, root_cause

FINISH_REASONS = ("stop", "length")
MAX_LOGPROB = 0.01
"""Log-probabilities are at most 0; kernels of low precision round to a little more."""


class WrongAnswerError(EngineError):
    """An engine's answer violates the protocol; the answer is discarded."""


def _fault(response: Response, params: SamplingParams, vocab_size: int | None) -> str:
    """Describe the error in a response to a request; empty if the response is valid."""
    ids, logprobs, highest = response.response_ids, response.logprobs, vocab_size or MOST_IDS
    if not 1 <= len(ids) <= params.max_tokens:
        return f"the response has {len(ids)} tokens, expected 1 to {params.max_tokens}"
    if ids.dtype.kind not in "iu" or logprobs.shape != ids.shape:
        return (
            f"the response has ids of {ids.dtype} and {logprobs.shape} log-probabilities, expected integers, one each"
        )
    if ids.min() < 0 or ids.max() >= highest:
        outside = ids[(ids < 0) | (ids >= highest)][0]
        return f"the response has token id {outside}, expected 0 to {highest - 1}"
    if not (np.isfinite(logprobs).all() and logprobs.max() <= MAX_LOGPROB):
        found = logprobs[~(np.isfinite(logprobs) & (logprobs <= MAX_LOGPROB))][0]
        return (
            f"the response has a log-probability of {found}, expected a finite number of at most 0. If every response has NaN, the "
            f"weights of version {response.weight_version} are broken: lower lr and continue from the last checkpoint. If only "
            "some have NaN, their prompts overflow the engine's dtype"
        )
    if response.finish_reason not in FINISH_REASONS:
        return f"the response has finish_reason {response.finish_reason!r}, expected one of {FINISH_REASONS}"
    if response.weight_version < 0:
        return f"the response has weight version {response.weight_version}, expected 0 or more"
    return ""


SEND_AFTER_S = 0.03
"""Maximum time in seconds that a request waits for others to be sent with it, while their environments are stepping."""
QUIET_PASSES = 4
"""Passes of the event loop without a new request before requests are sent; an episode that ends starts the next within three."""


class EngineLink:
    """Sends requests of one event loop to one engine and keeps a call waiting there while any request is unanswered.

    The answers of the engine are validated against the requests.

    Args:
        handle: the engine actor.
        vocab_size: vocabulary size of the engine's model; with ``None``, token ids are not checked against it.
        owner: start of the name by which the engine knows this link.
    """

    def __init__(self, handle: ActorHandle[Any], vocab_size: int | None = None, owner: str = "") -> None:
        self._handle = handle
        self._vocab_size = vocab_size
        self._name = f"{owner}/{uuid.uuid4().hex}"
        self._num_asked = 0
        self._pending: dict[int, tuple[SamplingParams, asyncio.Future[Response]]] = {}
        self._unsent: list[SentRequest] = []
        self._send_by: float | None = None
        self._quiet_passes = 0
        self._calls: set[asyncio.Task[None]] = set()

    async def ask(self, prompt_ids: np.ndarray, params: SamplingParams, timeout_s: float) -> Response:
        """Sample one response.

        Raises:
            TimeoutError: no response within ``timeout_s`` seconds.
            InvalidRequestError: the request itself is invalid, as found here or by the engine.
            EngineError: the engine rejected the request, failed or died.
            WrongAnswerError: the answer violates the protocol.
        """
        # Check here: an error must fail only this request, not the whole message.
        check_request(prompt_ids, params, max_model_len=None, vocab_size=self._vocab_size)
        number, answer = self._num_asked, asyncio.get_running_loop().create_future()
        self._num_asked += 1
        self._pending[number] = params, answer
        self._unsent.append((number, prompt_ids, params))
        self._send_soon()
        try:
            async with asyncio.timeout(timeout_s):
                response: Response = await answer
                return response
        finally:
            del self._pending[number]
            if answer.cancelled() and not any(unsent == number for unsent, *_ in self._unsent):
                self._abandon(number)

    def _send_soon(self) -> None:
        self._quiet_passes = 0
        if self._send_by is None:
            self._send_by = time.monotonic() + SEND_AFTER_S
            asyncio.get_running_loop().call_soon(self._send_when_quiet)
        elif self._unsent and time.monotonic() > self._send_by:
            self._send()

    def _send_when_quiet(self) -> None:
        """Run once per pass: if no more requests arrive, send the rest, or request answers if no call is waiting for them."""
        self._quiet_passes += 1
        if self._quiet_passes < QUIET_PASSES:
            asyncio.get_running_loop().call_soon(self._send_when_quiet)
            return
        self._send_by = None
        if self._unsent or (self._pending and not self._calls):
            self._send()

    def _send(self) -> None:
        wanted = [request for request in self._unsent if request[0] in self._pending]
        self._unsent = []
        try:
            # Sent now; a task would start only when the pass has ended.
            call: ObjectRef[bytes] = self._handle.exchange.remote(self._name, pickle.dumps(wanted))
        except Exception as error:  # of Ray's, for one: nothing would answer these
            self._fail_all(error)
            return
        task = asyncio.ensure_future(self._receive(call))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        if self._send_by is not None:
            self._send_by = time.monotonic() + SEND_AFTER_S

    def _abandon(self, number: int) -> None:
        """Abort a request in the engine, because its caller has been cancelled or its deadline has passed."""
        with suppress(RaySystemError):  # Ray was shut down, and the engine with it.
            self._handle.abandon.remote(self._name, [number])

    async def _receive(self, call: Awaitable[bytes]) -> None:
        try:
            self._deliver(pickle.loads(await call))
        except Exception as error:  # whatever it is, it reaches those who wait
            self._fail_all(root_cause(error))

    def _deliver(self, answers: list[SentAnswer]) -> None:
        """Pass on the answers; if one response is wrong, no response in its message is used.

        Raises:
            WrongAnswerError: an answer refers to a request that was never sent.
        """
        if unknown := [number for number, _ in answers if not 0 <= number < self._num_asked]:
            raise WrongAnswerError(f"The engine answered request {unknown[0]}, which was never sent.")
        # Ignore answers whose caller has stopped waiting.
        answered = [(*self._pending[number], answer) for number, answer in answers if number in self._pending]
        faults = [
            _fault(answer, params, self._vocab_size)
            for params, _, answer in answered
            if not isinstance(answer, EngineError)
        ]
        wrong = next(filter(None, faults), "")
        for _, waiting, answer in answered:
            if isinstance(answer, EngineError):
                _fail(waiting, answer)
            elif wrong:
                _fail(waiting, WrongAnswerError(wrong))
            elif not waiting.done():
                waiting.set_result(answer)
        # After the coroutines that were answered: they act, and most ask again.
        self._send_soon()

    def _fail_all(self, cause: BaseException) -> None:
        self._unsent.clear()  # they go elsewhere, too
        for _, waiting in self._pending.values():
            _fail(waiting, cause)


def _fail(waiting: asyncio.Future[Response], cause: BaseException) -> None:
    if not waiting.done():
        error = cause if isinstance(cause, EngineError) else EngineError(f"{type(cause).__name__}: {cause}")
        waiting.set_exception(error)


ATTEMPTS = 3
"""Maximum number of different engines that are tried for one request."""


@dataclass(slots=True)
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
    """Sends each request to one of the engines, and to the next engine if that attempt fails.

    Requests with the same affinity (a group of rollouts) go to the same engine and reuse its prefix cache. A new group goes to
    the engine that serves the fewest groups of this client; :meth:`end_group` marks the end of a group.

    Args:
        handles: engine actors, as from ``EnginePool.handles``.
        timeout_s: deadline of one request over all attempts, in seconds; each attempt gets an equal share of the remaining time.
        vocab_size: vocabulary size of the engines' model, which limits the token ids in responses; ``None`` accepts any.
        owner: id of the actor that this client belongs to; ``EnginePool.abandon`` drops its requests if the actor is lost.

    Attributes:
        counts: counts of the requests so far.
    """

    def __init__(
        self,
        handles: Sequence[ActorHandle[Any]],
        *,
        timeout_s: float = 600.0,
        vocab_size: int | None = None,
        owner: str = "",
    ) -> None:
        self._timeout_s = timeout_s
        self._vocab_size = vocab_size
        self._owner = owner
        self._loop: asyncio.AbstractEventLoop | None = None
        self.counts = RequestCounts()
        self.replace_handles(handles)

    def replace_handles(self, handles: Sequence[ActorHandle[Any]]) -> None:
        """Use these engines from now on (after a restart)."""
        self._handles = handles
        self._links = [EngineLink(handle, self._vocab_size, self._owner) for handle in handles]
        self._group_engine: dict[Hashable, int] = {}

    async def generate(
        self, prompt_ids: np.ndarray, params: SamplingParams, affinity: Hashable, preferred: int = 0
    ) -> Response:
        """Sample one response.

        Args:
            prompt_ids: int ``[P]``.
            params: sampling parameters.
            affinity: key of the group.
            preferred: index at which the search for the least busy engine starts, modulo the number of engines. Clients in
                several processes do not see each other's groups; they spread the groups evenly if the groups of all clients are
                numbered consecutively.

        Raises:
            InvalidRequestError: the request itself is invalid.
            EngineError: every attempt failed or the deadline passed; the message contains the reason of each attempt.
        """
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # A new event loop: drop the state of the old one.
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
            f"No engine answered ({len(failures)} of {len(links)} tried, deadline {self._timeout_s:.0f} s): "
            + "; ".join(failures)
        )

    def end_group(self, affinity: Hashable) -> None:
        """End the group with this affinity: no further requests of the group follow."""
        self._group_engine.pop(affinity, None)

    def _engine_of(self, affinity: Hashable, preferred: int) -> int:
        if not self._links:
            raise EngineError("No engine is left, and no replacement has started yet.")
        if affinity not in self._group_engine:
            groups, count = Counter(self._group_engine.values()), len(self._links)
            order = [(preferred + offset) % count for offset in range(count)]
            self._group_engine[affinity] = min(order, key=groups.__getitem__)  # the first of the least busy
        return self._group_engine[affinity]
