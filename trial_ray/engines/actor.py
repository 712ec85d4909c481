"""Base class of the engine actors: one thread runs the batches, and coroutines pass requests to this thread."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import pickle
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from trial_ray.engines.link import AnswerQueue, AnswerQueues, SentRequest
from trial_ray.engines.protocol import (
    EnginePart,
    EngineUsage,
    InvalidRequestError,
    Request,
    WeightLock,
    check_request,
    overflow_error,
)
from trial_ray.engines.weights import TextLogprobs, Weights, require_agreement
from trial_ray.errors import CannotServeError, EngineError, WeightSyncError
from trial_ray.files import Json
from trial_ray.process import STDERR, STEP, advance, announce, event, note_event, peak_memory

STEP_TIMEOUT_S = 300.0
"""Seconds after which a decoding step counts as hung: the engine reports that it cannot serve, and the pool replaces it."""
DRAIN_TIMEOUT_S = 660.0
"""Default deadline in seconds for running responses to finish before weights change or the engine sleeps."""
MIN_ANSWER_SHARE = 1 / 10
"""Finished responses are sent at once if they are at least this share of the requests that still run; fewer responses wait for
the next decoding steps. A message costs engine and client more time than a finished response loses by waiting for a step."""
MAX_STEPS_WAITED = 2
"""Maximum number of decoding steps that a finished response waits for other responses before it is sent."""


class EngineActor(ABC):
    """Methods of an engine actor; subclasses define how a model starts, samples and loads weights.

    One thread runs all code that uses the model: the decoding steps and, between two steps, calls such as a weight update. The
    actor's event loop therefore always responds. The abstract methods are called only in this thread.

    Args:
        max_model_len: maximum number of tokens of prompt and response together.
    """

    def __init__(self, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self._lock = WeightLock()
        self._text: TextLogprobs | None = None  # Fixed text and its log-probabilities, sent with the weights.
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # Functions for the engine's thread.
        self._joining: list[Request] = []
        self._in_flight: set[Request] = set()
        self._finished: list[Request] = []  # Requests that have finished and are not delivered yet.
        self._steps_waited = 0  # Number of steps since the first undelivered request finished.
        self._answers = AnswerQueues()
        self._admitting: set[asyncio.Task[None]] = set()
        self._thread: threading.Thread | None = None
        self._opening: asyncio.Task[Json] | None = None
        self._info: Json = {}
        self._failure = "it was not started; call ready first"
        self._ended = False
        self._answering_version = -1  # Newest weight version that gave a response with finite log-probabilities.
        self._step_began: float | None = None
        self._usage = EngineUsage()
        self._batch_size = 0  # Number of requests in the batch of the last step; subclasses set it.

    async def ready(self) -> Json:
        """Start the engine (idempotent) and return ``{"engine", "vocab_size", "pid"}``."""
        if self._opening is None:
            self._opening = asyncio.create_task(self._start())
        info = await asyncio.shield(self._opening)
        self._check_alive()
        return {**info, "pid": os.getpid()}

    async def exchange(self, client: str, requests: bytes) -> bytes:
        """Accept new requests of a client, and return all answers to the client that are ready.

        The call waits for an answer; it returns an empty list if the client calls again first, or after a minute. A failed
        request is answered with its error: ``InvalidRequestError``, or ``EngineError`` if a step failed or there are no weights.

        Args:
            client: unique name of the client.
            requests: a pickled list of :data:`SentRequest`, which may be empty.

        Returns:
            A pickled list of :data:`SentAnswer`.

        Raises:
            EngineError: the engine can no longer serve.
        """
        self._check_alive()
        answers = self._answers.of(client)
        # Admit requests in a separate task: they may wait for new weights, and answers must reach the client meanwhile.
        if admitted := self._valid_requests(answers, pickle.loads(requests)):
            task = asyncio.create_task(self._admit(admitted))
            self._admitting.add(task)
            task.add_done_callback(self._admitting.discard)
        return pickle.dumps(await answers.collect())

    def _valid_requests(self, answers: AnswerQueue, sent: list[SentRequest]) -> list[Request]:
        """Return the valid requests, and answer the other requests with their errors."""
        valid = []
        vocab_size = self._info["vocab_size"]
        for number, prompt_ids, params in sent:
            try:
                check_request(prompt_ids, params, max_model_len=self._max_model_len, vocab_size=vocab_size)
            except InvalidRequestError as error:
                answers.put(number, error)
            else:
                request = answers.running[number] = Request(prompt_ids, params, partial(answers.put, number))
                valid.append(request)
        return valid

    async def _admit(self, admitted: list[Request]) -> None:
        try:
            version = await self._lock.acquire_read(len(admitted))
        except EngineError as error:
            for request in admitted:
                request.reply(error)
            return
        for request in admitted:
            request.weight_version = version
        waiting = [request for request in admitted if not request.aborted]
        self._lock.release_read(len(admitted) - len(waiting))
        self._calls.put(partial(self._join, waiting))
        if self._thread is None:
            self._end_requests()

    async def abort(self, client: str, numbers: Collection[int] | None = None) -> None:
        """Stop sampling responses that a client no longer waits for; requests that were answered already are ignored.

        Args:
            client: name of the client, or the beginning of its name.
            numbers: the numbers that the client gave to these requests; ``None`` stops all requests of the client.
        """
        self._calls.put(partial(self._abort_requests, self._answers.abort(client, numbers)))

    async def load_weights(self, weights: Weights, drain_timeout_s: float = DRAIN_TIMEOUT_S) -> tuple[int, str]:
        """Replace the weights and their version, and drop all cached prompt prefixes.

        Running responses finish first, with the weights that they started with, while new requests wait. The load fails if the
        received weights differ from the sent weights in checksum or arrangement (``WeightsChecksum``), or if the engine's
        log-probabilities of a fixed text differ from those in ``weights.text``. While the engine sleeps and has no key-value
        cache, the log-probabilities are not compared until :meth:`wake`. After a failed load, the engine rejects requests until a
        later load succeeds.

        Args:
            weights: the weights and their version.
            drain_timeout_s: deadline for the running responses, in seconds.

        Returns:
            Version and ``weights_checksum`` of the engine's weights.

        Raises:
            EngineError: the weights do not fit the model, or the running responses did not finish in time.
            WeightSyncError: the received weights, or the log-probabilities computed with them, differ from those of the sender.
        """
        await self.ready()
        async with self._lock.write(drain_timeout_s):
            self._lock.version = -1
            if "weights" in self._lock.asleep:
                raise EngineError("The engine's weights are asleep; wake them before new ones are loaded.")
            # Keep the lock until the checks have passed: no request may be sampled under weights other than those sent.
            checksum: str = await self._in_thread(self._load_weights, weights)
            self._lock.version = weights.version
        return weights.version, checksum

    async def sleep(self, level: int = 1, drain_timeout_s: float = DRAIN_TIMEOUT_S) -> None:
        """Free weights and key-value cache once running responses have finished; reject requests until both are allocated again.

        Args:
            level: 1 keeps the weights in host memory; 2 drops the weights and their version.
            drain_timeout_s: deadline for the running responses, in seconds.

        Raises:
            EngineError: the running responses did not finish in time.
        """
        self._check_alive()
        async with self._lock.write(drain_timeout_s):
            if self._lock.asleep:
                return
            self._lock.asleep = {"weights", "cache"}
            if level > 1:
                self._lock.version, self._text = -1, None
            await self._in_thread(self._sleep, level)

    async def wake(self, part: EnginePart) -> None:
        """Allocate ``part`` again after :meth:`sleep`: ``"weights"`` before weights are loaded, and the ``"cache"`` afterwards.

        Raises:
            EngineError: the engine can no longer serve.
            WeightSyncError: the engine's log-probabilities of the fixed text differ from those sent; see :meth:`load_weights`.
        """
        self._check_alive()
        async with self._lock.mutex:
            if part not in self._lock.asleep:
                return
            await self._in_thread(self._wake, part)
            self._lock.asleep.remove(part)
            if not self._lock.asleep:
                version, self._lock.version = self._lock.version, -1
                await self._in_thread(self._compare_text)
                self._lock.version = version

    async def weight_version(self) -> int:
        """Return the version of the weights; -1 if the engine has no weights, as before the first ``load_weights``.

        Raises:
            EngineError: the engine failed or hangs, and can no longer serve.
        """
        self._check_alive()
        return self._lock.version

    async def report(self) -> Json:
        """Return the usage so far (:class:`EngineUsage`) and the peak memory of the process (keys of ``peak_memory``)."""
        return {**asdict(self._usage), **peak_memory()}

    async def shutdown(self) -> None:
        """Stop the engine's thread and free the model; running requests and waiting calls fail."""
        if self._thread is None:
            return
        self._failure = "it was shut down"
        self._ended = True
        self._calls.put(lambda: None)  # Wake the thread if it is idle.
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)
        self._thread = None
        self._end_requests()

    @abstractmethod
    def _open(self) -> Json:
        """Load the model; return ``{"engine", "vocab_size"}``."""

    @abstractmethod
    def _step(self, joining: list[Request]) -> list[Request]:
        """Add the requests ``joining``, sample one or more tokens for all running requests, and return those that finished."""

    @abstractmethod
    def _abort(self, requests: Collection[Request]) -> None:
        """Stop sampling these running requests; :meth:`_step` does not return them."""

    @abstractmethod
    def _replace_weights(self, weights: Weights) -> tuple[str, str]:
        """Load the weights into the idle model.

        Returns:
            Checksum and arrangement (``WeightsChecksum``) of the model's weights. If the model stores tensors in another form
            than a checkpoint, the arrangement is computed from the received tensors.
        """

    @abstractmethod
    def _score(self, token_ids: np.ndarray) -> np.ndarray:
        """Return the log-probabilities (temperature 1) of all P tokens but the first, float32 ``[P - 1]``; the model is idle."""

    @abstractmethod
    def _sleep(self, level: int) -> None:
        """Free the device memory of the idle model; level 1 keeps the weights in host memory."""

    @abstractmethod
    def _wake(self, part: EnginePart) -> None:
        """Allocate again the memory that :meth:`_sleep` freed."""

    @abstractmethod
    def _recover(self) -> None:
        """Discard every request after a failed step; raise an error if the engine cannot continue."""

    @abstractmethod
    def _close(self) -> None:
        """Free the model, and end every process that the engine started."""

    def _load_weights(self, weights: Weights) -> str:
        checksum, arrangement = self._replace_weights(weights)
        if checksum != weights.checksum:
            raise WeightSyncError(
                f"Version {weights.version} was sent with checksum {weights.checksum}, the engine has {checksum}; it serves "
                "neither version."
            )
        if arrangement != weights.arrangement:
            raise WeightSyncError(
                f"Version {weights.version} was sent with names and places of digest {weights.arrangement}, the engine has "
                f"{arrangement} of equal values: tensors have other names, or elements other places; the engine serves neither "
                "version."
            )
        self._text = weights.text
        if not self._lock.asleep:
            self._compare_text()
        return checksum

    def _compare_text(self) -> None:
        if self._text is not None:
            logprobs = self._score(self._text.token_ids[: self._max_model_len - 1])
            require_agreement(self._text, logprobs, self._info["engine"])

    def _check_alive(self) -> None:
        if self._failure:
            raise self._cannot_serve()
        # The event loop responds even if the thread hangs, so callers cannot notice the hang without this check.
        began = self._step_began
        if began is not None and (seconds := time.monotonic() - began) > STEP_TIMEOUT_S:
            faulthandler.dump_traceback(STDERR)
            raise CannotServeError(f"The engine cannot serve: a step has been running for {seconds:.0f} s.")

    def _cannot_serve(self) -> EngineError:
        return CannotServeError(f"The engine cannot serve: {self._failure}.")

    async def _start(self) -> Json:
        announce()
        self._loop = asyncio.get_running_loop()
        # The thread is a daemon, because an actor that Ray stops must not wait for it.
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()
        await self._in_thread(self._open_model)
        if not self._ended:
            self._failure = ""
        return self._info

    def _open_model(self) -> None:
        self._info = self._open()

    async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function in the engine's thread and return its result; skip it if the caller is cancelled before it starts."""
        if self._thread is None:
            raise self._cannot_serve()
        done: Future[Any] = Future()

        def call() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                if self._ended:
                    raise self._cannot_serve()
                with event(function.__name__.strip("_").replace("_", " ")):
                    result = function(*args)
                done.set_result(result)
            except Exception as error:
                done.set_exception(error)
            advance()

        self._calls.put(call)
        return await asyncio.wrap_future(done)

    def _work(self) -> None:
        while not self._ended:
            if not self._in_flight:
                self._calls.get()()
            while not self._calls.empty():
                self._calls.get_nowait()()
            if self._in_flight:
                self._run_step()
        if self._info:  # There is a model only if _open() succeeded.
            self._close()

    def _join(self, requests: list[Request]) -> None:
        self._joining += requests
        self._in_flight.update(requests)

    def _abort_requests(self, requests: list[Request]) -> None:
        """Stop generation requests between two decoding steps; requests that have finished are ignored."""
        aborted = self._in_flight.intersection(requests)
        joining = aborted.intersection(self._joining)
        self._joining = [request for request in self._joining if request not in joining]
        if running := aborted - joining:
            self._abort(running)
        self._in_flight -= aborted
        self._loop.call_soon_threadsafe(self._lock.release_read, len(aborted))
        if not self._in_flight:  # No further step runs, so deliver the finished requests now.
            self._deliver_finished()

    def _end_requests(self) -> None:
        """Reject the calls that wait for the ended thread, and fail the generation requests that it has not finished."""
        while not self._calls.empty():
            self._calls.get_nowait()()
        self._fail_requests("the engine was shut down before the response was finished")

    def _run_step(self) -> None:
        joining, self._joining = self._joining, []
        began = self._step_began = time.monotonic()
        try:
            finished = self._step(joining)
        except Exception as error:  # Every client that waits for this step receives the error, whatever its type.
            try:
                self._recover()
            except Exception as fatal:
                self._failure = f"a step failed: {fatal!r}"
            self._fail_requests(f"a step of the engine failed: {error!r}")
            return
        finally:
            self._step_began = None
        self._usage.add(finished, time.monotonic() - began)
        note_event(
            STEP,
            began,
            requests=len(self._in_flight),
            batch=self._batch_size,
            joined=len(joining),
            finished=len(finished),
        )
        advance()
        self._in_flight.difference_update(finished)
        self._steps_waited = self._steps_waited + 1 if self._finished else 0
        self._finished += finished
        are_enough = len(self._finished) >= MIN_ANSWER_SHARE * len(self._in_flight)
        if are_enough or self._steps_waited >= MAX_STEPS_WAITED:
            self._deliver_finished()

    def _deliver_finished(self) -> None:
        finished, self._finished = self._finished, []
        if finished:
            self._loop.call_soon_threadsafe(self._deliver, finished)

    def _fail_requests(self, reason: str) -> None:
        self._deliver_finished()
        failed, self._in_flight = self._in_flight, set()
        self._loop.call_soon_threadsafe(self._deliver, failed, EngineError(reason))

    def _deliver(self, requests: Collection[Request], error: EngineError | None = None) -> None:
        """Pass finished requests, or the error that ended them, to their clients; runs in the event loop."""
        self._lock.release_read(len(requests))
        # Deliver responses first: errors for non-finite log-probabilities state whether these weights have answered other prompts.
        for request in sorted(requests, key=lambda request: request.overflow != ""):
            if error is not None:
                request.reply(error)
            elif request.overflow:
                request.reply(overflow_error(request, self._answering_version == request.weight_version))
            else:
                self._answering_version = request.weight_version
                request.reply(request.response())
