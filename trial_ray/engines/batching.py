"""Base class of both engines: one thread runs the batches, and coroutines pass requests to it."""

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

from trial_ray.engines.admission import (
    AdmissionGate,
    EngineUsage,
    Outbox,
    Outboxes,
    Request,
    check_request,
    overflow_error,
)
from trial_ray.engines.protocol import EnginePart, SentRequest
from trial_ray.engines.weights import TextLogprobs, Weights, require_agreement
from trial_ray.errors import CannotServeError, EngineError, WeightSyncError
from trial_ray.process import (
    STDERR,
    STEP,
    ProcessEvents,
    advance,
    announce,
    event,
    note_event,
    peak_memory,
    process_events,
)

STEP_TIMEOUT_S = 300.0
"""Seconds after which a step counts as hung: the engine then reports that it cannot serve, and is replaced."""
DRAIN_TIMEOUT_S = 660.0
"""Default deadline for running responses to finish before weights change or the engine sleeps, in seconds."""
FEW_ANSWERS = 1 / 10
"""Answers to less than this share of the running requests wait for the answers of the next steps. A message with few answers
costs both processes more than the requests lose by waiting a step, out of dozens of steps per response."""
MOST_STEPS_HELD = 2
"""Maximum number of steps that a finished answer waits."""
_NOT_STARTED = "it was not started; call ready first"


class BatchingEngine(ABC):
    """Methods of an engine actor; subclasses define how a model starts, samples and loads weights.

    All code that uses the model runs in one thread, and other calls run there between two steps. The actor's event loop therefore
    always responds. Methods with an underscore that subclasses implement are called only in that thread.

    Args:
        max_model_len: maximum number of tokens of prompt and response together.
    """

    def __init__(self, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self._gate = AdmissionGate()
        self._text: TextLogprobs | None = None  # of the weights that are held
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # what the thread shall do
        self._joining: list[Request] = []
        self._in_flight: set[Request] = set()
        self._held: list[Request] = []  # finished, and not handed out yet
        self._steps_held = 0  # since the first of them finished
        self._outboxes = Outboxes()
        self._admitting: set[asyncio.Task[None]] = set()
        self._thread: threading.Thread | None = None
        self._opening: asyncio.Task[dict[str, Any]] | None = None
        self._info: dict[str, Any] = {}
        self._failure = _NOT_STARTED
        self._ended = False
        self._answering_version = -1  # of the newest weights under which some response had probabilities
        self._step_began: float | None = None
        self._usage = EngineUsage()
        self._batch_size = 0  # requests that the last step computed; subclasses set it

    async def ready(self) -> dict[str, Any]:
        """Start the engine (idempotent) and return ``{"engine", "vocab_size", "stop_token_ids", "pid"}``."""
        if self._opening is None:
            self._opening = asyncio.create_task(self._start())
        info = await asyncio.shield(self._opening)
        self._check_alive()
        return {**info, "pid": os.getpid()}

    async def exchange(self, client: str, requests: bytes) -> bytes:
        """Accept further requests of a client, and return all new answers to its earlier and further requests.

        Waits until there is an answer, unless the client calls again: the earlier call then returns an empty list. An error of a
        single request is its answer (``InvalidRequestError``, or an ``EngineError`` without weights or after a failed step).

        Args:
            client: unique name of the client.
            requests: a pickled list of :data:`SentRequest`, which may be empty.

        Returns:
            A pickled list of :data:`SentAnswer`.

        Raises:
            EngineError: the engine can no longer serve.
        """
        self._check_alive()
        outbox = self._outboxes.of(client)
        # A task of its own admits them, because answers must reach the client even while weights change.
        if admitted := self._checked(outbox, pickle.loads(requests)):
            task = asyncio.create_task(self._admit(admitted))
            self._admitting.add(task)
            task.add_done_callback(self._admitting.discard)
        return pickle.dumps(await outbox.take())

    def _checked(self, outbox: Outbox, sent: list[SentRequest]) -> list[Request]:
        """Return the valid requests, which the next call may abandon; the errors of the others are their answers."""
        admitted = []
        for number, prompt_ids, params in sent:
            try:
                check_request(
                    prompt_ids, params, max_model_len=self._max_model_len, vocab_size=self._info["vocab_size"]
                )
            except EngineError as error:
                outbox.put(number, error)
            else:
                request = outbox.running[number] = Request(prompt_ids, params, partial(outbox.put, number))
                admitted.append(request)
        return admitted

    async def _admit(self, admitted: list[Request]) -> None:
        try:
            version = await self._gate.enter(len(admitted))
        except EngineError as error:
            for request in admitted:
                request.reply(error)
            return
        for request in admitted:
            request.weight_version = version
        waiting = [request for request in admitted if not request.abandoned]
        self._gate.leave(len(admitted) - len(waiting))
        self._inbox.put(partial(self._join, waiting))
        if self._thread is None:
            self._end_requests()

    async def abandon(self, client: str, numbers: Collection[int] | None = None) -> None:
        """Stop sampling responses that a client no longer waits for; requests that were answered already are ignored.

        Args:
            client: name of the client, or the beginning of its name.
            numbers: the client's numbers of these requests; ``None``: all of its requests.
        """
        self._inbox.put(partial(self._drop, self._outboxes.abandon(client, numbers)))

    async def load_weights(self, weights: Weights, drain_timeout_s: float = DRAIN_TIMEOUT_S) -> tuple[int, str]:
        """Replace the weights, drop every cached prefix and adopt the version of the new weights.

        Running responses finish first, under the weights they started with; new requests wait. If the load fails, the engine has
        no version and rejects requests until a complete load succeeds. The load also fails if the received weights differ from
        the sent weights in checksum or arrangement (``WeightsChecksum``), or if the engine computes another policy with them. An
        engine with a sleeping cache checks the policy when it wakes.

        Args:
            weights: the weights and their version.
            drain_timeout_s: deadline for the running responses, in seconds.

        Returns:
            Version and ``weights_checksum`` of the engine's weights.

        Raises:
            EngineError: the weights do not fit the model, or the running responses did not finish in time.
            WeightSyncError: the received weights differ from the sent weights, or the engine computes another policy with them.
        """
        await self.ready()
        async with self._gate.held(drain_timeout_s):
            self._gate.version = -1
            if "weights" in self._gate.asleep:
                raise EngineError("The engine's weights are asleep; wake them before new ones are loaded.")
            # Inside the gate: no request may enter before these are known to be the weights that were sent.
            checksum: str = await self._in_thread(self._load_weights, weights)
            self._gate.version = weights.version
        return weights.version, checksum

    async def sleep(self, level: int = 1, drain_timeout_s: float = DRAIN_TIMEOUT_S) -> None:
        """Release the device's memory after the running responses; requests are rejected until both parts are awake again.

        Args:
            level: 1 keeps the weights in host memory; 2 drops the weights and their version.
            drain_timeout_s: deadline for the running responses, in seconds.

        Raises:
            EngineError: the running responses did not finish in time.
        """
        self._check_alive()
        async with self._gate.held(drain_timeout_s):
            if self._gate.asleep:
                return
            self._gate.asleep = {"weights", "cache"}
            if level > 1:
                self._gate.version, self._text = -1, None
            await self._in_thread(self._sleep, level)

    async def wake(self, part: EnginePart) -> None:
        """Allocate memory again: first for ``"weights"``, which can then be loaded, and last for the ``"cache"``.

        Raises:
            EngineError: the memory is not free.
            WeightSyncError: the engine computes another policy with the weights that were loaded during sleep.
        """
        self._check_alive()
        async with self._gate.lock:
            if part not in self._gate.asleep:
                return
            await self._in_thread(self._wake, part)
            self._gate.asleep.remove(part)
            if not self._gate.asleep:
                version, self._gate.version = self._gate.version, -1
                await self._in_thread(self._compare_text)
                self._gate.version = version

    async def weight_version(self) -> int:
        """Return the version of the weights; -1 if the engine has no weights, as before the first ``load_weights``.

        Raises:
            EngineError: the engine failed or hangs, and can no longer serve.
        """
        self._check_alive()
        return self._gate.version

    async def report(self) -> dict[str, Any]:
        """Return the usage so far (:class:`EngineUsage`) and the peak memory of the process (keys of ``peak_memory``)."""
        return {**asdict(self._usage), **peak_memory()}

    async def recorded_events(self, since: float, most: int) -> ProcessEvents:
        """Return the steps and calls of the engine's thread; arguments as in ``process_events``."""
        return process_events(since, most)

    async def shutdown(self) -> None:
        """Stop the thread and free the model; running requests and waiting calls fail."""
        if self._thread is None:
            return
        self._failure = "it was shut down"
        self._ended = True
        self._inbox.put(lambda: None)  # the thread may wait for something
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)
        self._thread = None
        self._end_requests()

    @abstractmethod
    def _open(self) -> dict[str, Any]:
        """Load the model; return what ``ready`` returns."""

    @abstractmethod
    def _step(self, joining: list[Request]) -> list[Request]:
        """Add ``joining``, sample one or more tokens for the running requests, and return the requests that finished."""

    @abstractmethod
    def _abort(self, requests: Collection[Request]) -> None:
        """Stop sampling these running requests; :meth:`_step` does not return them."""

    @abstractmethod
    def _replace_weights(self, weights: Weights) -> tuple[str, str]:
        """Load the weights into the idle model.

        Returns:
            Checksum and arrangement (``WeightsChecksum``) of the model's weights. If the model's tensors are not in checkpoint
            form, the arrangement is computed from the received tensors.
        """

    @abstractmethod
    def _score(self, token_ids: np.ndarray) -> np.ndarray:
        """Log-probabilities float32 ``[P - 1]`` of all tokens ``[P]`` but the first, by the idle model, without temperature."""

    @abstractmethod
    def _sleep(self, level: int) -> None:
        """Free the idle model's memory; level 1 keeps the weights on the host."""

    @abstractmethod
    def _wake(self, part: EnginePart) -> None:
        """Allocate again the memory that :meth:`_sleep` freed."""

    @abstractmethod
    def _recover(self) -> None:
        """Discard every request after a failed step; raise an error if the engine cannot continue."""

    @abstractmethod
    def _close(self) -> None:
        """Free the model and every process."""

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
        if not self._gate.asleep:
            self._compare_text()
        return checksum

    def _compare_text(self) -> None:
        if self._text is not None:
            found = self._score(self._text.token_ids[: self._max_model_len - 1])
            require_agreement(self._text, found, self._info["engine"])

    def _check_alive(self) -> None:
        if self._failure:
            raise self._cannot_serve()
        # The event loop answers even where the thread that computes hangs.
        began = self._step_began
        if began is not None and (seconds := time.monotonic() - began) > STEP_TIMEOUT_S:
            faulthandler.dump_traceback(STDERR)
            raise CannotServeError(f"The engine cannot serve: a step has been running for {seconds:.0f} s.")

    def _cannot_serve(self) -> EngineError:
        return CannotServeError(f"The engine cannot serve: {self._failure}.")

    async def _start(self) -> dict[str, Any]:
        announce()
        self._loop = asyncio.get_running_loop()
        # A daemon: an actor that Ray ends must not wait for it.
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()
        await self._in_thread(self._open_model)
        if self._failure == _NOT_STARTED:
            self._failure = ""
        return self._info

    def _open_model(self) -> None:
        self._info = self._open()

    async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function in the thread and return its result; skip it if the caller was cancelled before the function started."""
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

        self._inbox.put(call)
        return await asyncio.wrap_future(done)

    def _work(self) -> None:
        while not self._ended:
            if not self._in_flight:
                self._inbox.get()()
            while not self._inbox.empty():
                self._inbox.get_nowait()()
            if self._in_flight:
                self._advance()
        if self._info:  # else the model never came up, and there is nothing to free
            self._close()

    def _join(self, requests: list[Request]) -> None:
        self._joining += requests
        self._in_flight.update(requests)

    def _drop(self, requests: list[Request]) -> None:
        """Remove abandoned requests between two steps; finished ones are ignored."""
        joining = {request for request in self._joining if request in requests}
        running = {request for request in requests if request in self._in_flight} - joining
        self._joining = [request for request in self._joining if request not in joining]
        if running:
            self._abort(running)
        self._in_flight -= joining | running
        self._loop.call_soon_threadsafe(self._gate.leave, len(joining | running))
        if not self._in_flight:  # no further step hands them out
            self._hand_out()

    def _end_requests(self) -> None:
        """Reject calls that wait for the thread, which has ended, and report the requests that it will not finish."""
        while not self._inbox.empty():
            self._inbox.get_nowait()()
        self._fail_requests("the engine was shut down before the response was finished")

    def _advance(self) -> None:
        joining, self._joining = self._joining, []
        began = self._step_began = time.monotonic()
        try:
            finished = self._step(joining)
        except Exception as error:  # whatever the step raises reaches every client that waits for it
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
        self._steps_held = self._steps_held + 1 if self._held else 0
        self._held += finished
        if self._steps_held == MOST_STEPS_HELD or len(self._held) >= FEW_ANSWERS * len(self._in_flight):
            self._hand_out()

    def _hand_out(self) -> None:
        finished, self._held = self._held, []
        if finished:
            self._loop.call_soon_threadsafe(self._deliver, finished)

    def _fail_requests(self, reason: str) -> None:
        self._hand_out()
        failed, self._in_flight = self._in_flight, set()
        self._loop.call_soon_threadsafe(self._deliver, failed, EngineError(reason))

    def _deliver(self, requests: Collection[Request], error: EngineError | None = None) -> None:
        """Pass finished requests, or the error that ended them, to their clients; runs in the event loop."""
        self._gate.leave(len(requests))
        # Those without a fault first: they say that the weights of the others are not to blame.
        for request in sorted(requests, key=lambda request: request.fault != ""):
            if error is not None:
                request.reply(error)
            elif request.fault:
                request.reply(overflow_error(request, self._answering_version == request.weight_version))
            else:
                self._answering_version = request.weight_version
                request.reply(request.response())
