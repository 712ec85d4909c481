"""Request batching: one message carries many requests to an engine, and another message carries many answers back.

:class:`EngineLink` is the client's end, :class:`AnswerQueue` the engine's end. Messages are pickled to bytes here, because
Ray's own pickler runs Python code for every array and every dataclass.
"""

from __future__ import annotations

import asyncio
import pickle
import time
import uuid
from collections.abc import Awaitable, Collection, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RaySystemError

from trial_ray.engines.protocol import Request, Response, SamplingParams
from trial_ray.errors import EngineError, root_cause

Engines = Sequence[ActorHandle[Any]]
"""Handles of engine actors."""
SentRequest = tuple[int, np.ndarray, SamplingParams]
"""A request in a message, as ``(number that the client gave it, prompt ids, sampling parameters)``."""
SentAnswer = tuple[int, Response | EngineError]
"""An answer in a message, as ``(number of the request, response or error)``."""

MAX_SEND_DELAY_S = 0.03
"""Maximum time in seconds that a request waits for further requests that could be sent in the same message."""
QUIET_PASSES = 4
"""Number of passes of the event loop without a new request after which the collected requests are sent. The start of an episode
takes up to three passes, so the first request of a new episode can still join the message."""
FETCH_TIMEOUT_S = 60.0
"""Seconds after which the engine sends an empty reply to a waiting client, which then calls again."""
FORGET_AFTER_S = 600.0
"""Seconds without a call after which a client counts as gone, and its finished answers may be dropped."""


class EngineLink:
    """Sends requests of one event loop to one engine; while a request is unanswered, a call waits at the engine for answers.

    Args:
        handle: the engine actor.
        owner: beginning of the client name under which this link calls the engine.
    """

    def __init__(self, handle: ActorHandle[Any], owner: str) -> None:
        self._handle = handle
        self._name = f"{owner}/{uuid.uuid4().hex}"
        self._num_requests = 0
        self._pending: dict[int, asyncio.Future[Response]] = {}
        self._unsent: list[SentRequest] = []
        self._send_by: float | None = None
        self._quiet_passes = 0
        self._calls: set[asyncio.Task[None]] = set()

    async def generate(self, prompt_ids: np.ndarray, params: SamplingParams, timeout_s: float) -> Response:
        """Sample one response.

        Raises:
            TimeoutError: no response within ``timeout_s`` seconds.
            InvalidRequestError: the request itself is invalid.
            EngineError: the engine rejected the request, failed or died.
        """
        number, answer = self._num_requests, asyncio.get_running_loop().create_future()
        self._num_requests += 1
        self._pending[number] = answer
        self._unsent.append((number, prompt_ids, params))
        self._send_soon()
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        finally:
            del self._pending[number]
            if answer.cancelled() and not any(unsent == number for unsent, *_ in self._unsent):
                with suppress(RaySystemError):  # Raised after ray.shutdown(), which also ended the engine.
                    self._handle.abort.remote(self._name, [number])

    def _send_soon(self) -> None:
        self._quiet_passes = 0
        if self._send_by is None:
            self._send_by = time.monotonic() + MAX_SEND_DELAY_S
            asyncio.get_running_loop().call_soon(self._send_when_quiet)
        elif self._unsent and time.monotonic() > self._send_by:
            self._send()

    def _send_when_quiet(self) -> None:
        """Run in each pass of the event loop until no new requests arrive; then send the collected requests.

        Without collected requests, call the engine for answers if some are pending and no earlier call waits for them.
        """
        self._quiet_passes += 1
        if self._quiet_passes < QUIET_PASSES:
            asyncio.get_running_loop().call_soon(self._send_when_quiet)
            return
        self._send_by = None
        if self._unsent or (self._pending and not self._calls):
            self._send()

    def _send(self) -> None:
        requests = [request for request in self._unsent if request[0] in self._pending]
        self._unsent = []
        try:
            # Call the engine here: a task would start only when this pass of the event loop has ended.
            call: ObjectRef[bytes] = self._handle.exchange.remote(self._name, pickle.dumps(requests))
        except Exception as error:  # Ray raises errors of many types.
            self._fail_all(error)
            return
        task = asyncio.ensure_future(self._receive(call))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        if self._send_by is not None:
            self._send_by = time.monotonic() + MAX_SEND_DELAY_S

    async def _receive(self, call: Awaitable[bytes]) -> None:
        try:
            answers: list[SentAnswer] = pickle.loads(await call)
        except Exception as error:  # An error of any type fails all pending requests of this link.
            self._fail_all(root_cause(error))
            return
        for number, answer in answers:
            self._settle(number, answer)
        # Send after the answered coroutines have run: most of them request the next response.
        self._send_soon()

    def _fail_all(self, cause: BaseException) -> None:
        self._unsent.clear()
        error = cause if isinstance(cause, EngineError) else EngineError(f"{type(cause).__name__}: {cause}")
        for number in self._pending:
            self._settle(number, error)

    def _settle(self, number: int, answer: Response | EngineError) -> None:
        """Pass a response or error to the coroutine that requested it, unless the coroutine no longer waits."""
        waiting = self._pending.get(number)
        if waiting is None or waiting.done():
            return
        if isinstance(answer, EngineError):
            waiting.set_exception(answer)
        else:
            waiting.set_result(answer)


class AnswerQueue:
    """Answers to one client, kept until the client's next call.

    Attributes:
        running: requests of the client that have no answer yet, by the client's numbers for them.
    """

    def __init__(self) -> None:
        self.running: dict[int, Request] = {}
        self._answers: list[SentAnswer] = []
        self._waiting: asyncio.Future[None] | None = None
        self._called_at = time.monotonic()

    @property
    def is_stale(self) -> bool:
        """True if the client has not called for more than :data:`FORGET_AFTER_S` seconds."""
        return self._waiting is None and time.monotonic() - self._called_at > FORGET_AFTER_S

    def put(self, number: int, answer: Response | EngineError) -> None:
        """Add the answer to request ``number``: the response, or the error that replaces it."""
        self.running.pop(number, None)
        self._answers.append((number, answer))
        self._wake()

    async def collect(self) -> list[SentAnswer]:
        """Wait for answers and return them; return none if the client calls again, or after :data:`FETCH_TIMEOUT_S` seconds."""
        self._wake()
        self._called_at = time.monotonic()
        if not self._answers:
            waiting = self._waiting = asyncio.get_running_loop().create_future()
            try:
                await asyncio.wait([waiting], timeout=FETCH_TIMEOUT_S)
            finally:
                if self._waiting is waiting:
                    self._waiting = None
        answers, self._answers = self._answers, []
        return answers

    def _wake(self) -> None:
        if self._waiting is not None:
            self._waiting.set_result(None)
            self._waiting = None


class AnswerQueues(dict[str, AnswerQueue]):
    """The answer queues of an engine, by the names of its clients."""

    def of(self, client: str) -> AnswerQueue:
        """Return the queue of a client; a new queue is created for a new client, and stale queues are then removed."""
        if client not in self:
            for name in [name for name, answers in self.items() if answers.is_stale]:
                del self[name]
            self[client] = AnswerQueue()
        return self[client]

    def abort(self, client: str, numbers: Collection[int] | None) -> list[Request]:
        """Mark requests as aborted and return them; takes the arguments of ``EngineActor.abort``."""
        aborted = []
        for name, answers in self.items():
            if name.startswith(client):
                chosen = list(answers.running) if numbers is None else numbers
                aborted += [answers.running.pop(number) for number in chosen if number in answers.running]
        for request in aborted:
            request.aborted = True
        return aborted
