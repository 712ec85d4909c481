"""The way from one process to one engine: what coroutines ask for travels together, and answers come as they finish."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from ray import ObjectRef
from ray.actor import ActorHandle

from trial_ray.errors import EngineError, root_cause
from trial_ray.inference.admission import check_request
from trial_ray.inference.protocol import RequestBatch, Response, ResponseBatch, SamplingParams, prompt_digest
from trial_ray.inference.validation import Asked, WrongAnswerError, require_consistent, wrong_answer

SEND_AFTER_S = 0.03
"""A request waits at most so long for others of the same pass of the event loop, whose environments step before they ask."""


@dataclass(frozen=True, slots=True)
class _Pending:
    asked: Asked
    answer: asyncio.Future[Response]


@dataclass(slots=True)
class _Requests:
    """Requests of the coroutines of one event loop: a late answer to another loop finds that loop's own."""

    loop: asyncio.AbstractEventLoop
    pending: dict[int, _Pending] = field(default_factory=dict)
    unsent: list[tuple[int, np.ndarray, SamplingParams]] = field(default_factory=list)
    send_by: float | None = None
    calls: set[asyncio.Task[None]] = field(default_factory=set)


class EngineLink:
    """Sends requests to one engine and keeps one call waiting there for as long as any is unanswered.

    What the engine answers is compared with what it was asked (:mod:`trial_ray.inference.validation`): this is where its
    answers enter the process.

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

    async def ask(self, prompt_ids: np.ndarray, params: SamplingParams) -> Response:
        """Sample one response.

        Raises:
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
        asked = Asked(prompt_digest(prompt_ids), params.max_tokens, self._vocab_size)
        requests.pending[number] = _Pending(asked, answer)
        self._num_asked += 1
        requests.unsent.append((number, prompt_ids, params))
        self._send_soon(requests)
        try:
            response: Response = await answer
            return response
        finally:
            requests.pending.pop(number, None)

    def _send_soon(self, requests: _Requests) -> None:
        if requests.send_by is None:
            requests.send_by = time.monotonic() + SEND_AFTER_S
            requests.loop.call_soon(self._send_rest, requests)
        elif time.monotonic() > requests.send_by:
            self._send(requests)

    def _send_rest(self, requests: _Requests) -> None:
        """At the end of a pass: send what is left of it, or ask for answers if no call does."""
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
            self._deliver(requests, require_consistent(await call))
        except Exception as error:  # whatever it is, it reaches those who wait
            _fail_pending(requests, root_cause(error))
        finally:
            requests.calls.discard(asyncio.current_task())

    def _deliver(self, requests: _Requests, answers: ResponseBatch) -> None:
        """Hand on what was answered; with one wrong response, none of its message is taken: all may be shifted.

        Raises:
            WrongAnswerError: it holds an answer that was never asked for.
        """
        if unknown := [number for number in (*answers.numbers, *answers.failed) if not 0 <= number < self._num_asked]:
            raise WrongAnswerError(f"the engine answered to request {unknown[0]}, which was never sent")
        answered = [
            (requests.pending[number], response, digest)
            for (number, response), digest in zip(answers.split(), answers.prompt_digests, strict=True)
            if number in requests.pending  # else its caller has stopped waiting
        ]
        found = [wrong_answer(response, digest, pending.asked) for pending, response, digest in answered]
        wrong = [error for error in found if error is not None]
        for pending, response, _ in answered:
            if wrong:
                _fail(pending.answer, wrong[0])
            elif not pending.answer.done():
                pending.answer.set_result(response)
        for number, error in answers.failed.items():
            if number in requests.pending:
                _fail(requests.pending[number].answer, error)
        # After the coroutines that were answered: they act, and most ask again.
        requests.loop.call_soon(self._send_rest, requests)


def _fail_pending(requests: _Requests, cause: BaseException) -> None:
    requests.unsent.clear()  # they go elsewhere, too
    for pending in requests.pending.values():
        _fail(pending.answer, cause)


def _fail(answer: asyncio.Future[Response], cause: BaseException) -> None:
    if not answer.done():
        error = cause if isinstance(cause, EngineError) else EngineError(f"{type(cause).__name__}: {cause}")
        answer.set_exception(error)
