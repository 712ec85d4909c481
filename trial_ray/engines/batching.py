"""Base of both engines: one thread that batches, and coroutines that feed it."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from trial_ray.engines.admission import AdmissionGate, EngineUsage, Outbox, Request, check_request
from trial_ray.engines.agreement import TextLogprobs, require_agreement
from trial_ray.engines.protocol import EnginePart, RequestBatch, ResponseBatch
from trial_ray.engines.weights import Weights
from trial_ray.errors import EngineError, WeightSyncError
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
"""A step that takes longer hangs: the engine then says that it cannot serve, and is replaced."""
DRAIN_TIMEOUT_S = 600.0
"""Deadline of the responses under way before weights change or the engine sleeps."""
FEW_ANSWERS = 1 / 10
"""Answers that are less than this share of the requests under way wait for those of the next steps: a message for a few costs
both processes more than these lose by a step, of the dozens that a response takes."""
MOST_STEPS_HELD = 2
"""Steps for which an answer waits, at most."""
_NOT_STARTED = "it was not started; call ready first"


@dataclass(frozen=True)
class _Client:
    """The client of a request, and the version of the weights that sample it."""

    outbox: Outbox
    number: int
    weight_version: int


@dataclass(eq=False)
class _Call:
    """A call from the event loop to the thread; one that is cancelled before it began is not made."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    done: Future[Any] = field(default_factory=Future)

    def make(self) -> None:
        """In the thread; what it raises is raised again where it is awaited."""
        if self.done.set_running_or_notify_cancel():
            try:
                self.done.set_result(self.function(*self.args))
            except Exception as error:
                self.done.set_exception(error)

    def refuse(self, error: EngineError) -> None:
        """It will not be made."""
        if self.done.set_running_or_notify_cancel():
            self.done.set_exception(error)


class BatchingEngine(ABC):
    """The methods of an engine actor; subclasses say how a model starts, advances and takes weights.

    Everything that touches the model runs in one thread, between two steps, so the actor's event loop always answers.
    Methods with an underscore that subclasses implement are called in that thread only.

    Args:
        max_model_len: most tokens of prompt and response together.
    """

    def __init__(self, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self._gate = AdmissionGate()
        self._freed: set[EnginePart] = set()
        self._text: TextLogprobs | None = None  # of the weights that are held
        self._inbox: queue.SimpleQueue[list[Request] | _Call | None] = queue.SimpleQueue()
        self._in_flight: set[Request] = set()
        self._held: list[Request] = []  # finished, and not handed out yet
        self._steps_held = 0  # since the first of them finished
        self._clients: dict[Request, _Client] = {}
        self._outboxes: dict[str, Outbox] = {}
        self._admitting: set[asyncio.Task[None]] = set()
        self._thread: threading.Thread | None = None
        self._opening: asyncio.Task[dict[str, Any]] | None = None
        self._info: dict[str, Any] = {}
        self._failure = _NOT_STARTED
        self._part_lock = asyncio.Lock()
        self._answering_version = -1  # of the newest weights under which some response had probabilities
        self._step_began: float | None = None
        self._usage = EngineUsage()
        self._batch_size = 0  # requests that the last step computed; subclasses set it

    async def ready(self) -> dict[str, Any]:
        """Start the engine (idempotent); return ``{"engine", "model", "vocab_size", "stop_token_ids", "pid"}``."""
        if self._opening is None:
            self._opening = asyncio.create_task(self._start())
        info = await asyncio.shield(self._opening)
        self._check_alive()
        return {**info, "pid": os.getpid()}

    async def exchange(self, client: str, requests: RequestBatch) -> ResponseBatch:
        """Take further requests of a client, and return what has finished of all that it ever asked for.

        Waits until something has, unless the client calls again meanwhile: the earlier call then ends with nothing. The
        requests of all clients are batched inside. What is wrong with one request comes back as its own error
        (:class:`InvalidRequestError`, or an ``EngineError``: no weights were loaded yet, a step of the engine failed).

        Args:
            client: name of the client, unlike any other's.
            requests: may be empty.

        Raises:
            EngineError: the engine cannot serve any more.
        """
        self._check_alive()
        if client not in self._outboxes:
            self._outboxes = {name: outbox for name, outbox in self._outboxes.items() if not outbox.abandoned}
            self._outboxes[client] = Outbox()
        outbox = self._outboxes[client]
        if requests.numbers:
            # A task of its own: what has finished must reach the client even while weights change.
            task = asyncio.create_task(self._admit(outbox, requests))
            self._admitting.add(task)
            task.add_done_callback(self._admitting.discard)
        return await outbox.take()

    async def _admit(self, outbox: Outbox, requests: RequestBatch) -> None:
        admitted = []
        for number, prompt_ids, params in requests.split():
            try:
                check_request(
                    prompt_ids, params, max_model_len=self._max_model_len, vocab_size=self._info["vocab_size"]
                )
            except EngineError as error:
                outbox.fail(number, error)
            else:
                admitted.append((number, Request(prompt_ids, params)))
        if not admitted:
            return
        try:
            version = await self._gate.enter(len(admitted))
        except EngineError as error:
            for number, _ in admitted:
                outbox.fail(number, error)
            return
        for number, request in admitted:
            self._clients[request] = _Client(outbox, number, version)
        entering = [request for _, request in admitted]
        if self._thread is None:
            self._deliver(entering, self._cannot_serve())
        else:
            self._inbox.put(entering)

    async def load_weights(self, weights: Weights, drain_timeout_s: float = DRAIN_TIMEOUT_S) -> tuple[int, str]:
        """Replace the weights, drop every cached prefix, adopt their version.

        Responses under way finish first, under the weights they began with; requests that come meanwhile wait. When it
        fails, the engine has no version and refuses requests until a whole load succeeds. It fails, too, where the checksum or
        the arrangement (``WeightsChecksum``) of what has arrived is another than that of what was sent, or where the engine
        computes another policy of it; one whose cache sleeps compares that when it wakes.

        Returns:
            Version, and ``weights_checksum`` of what the engine now holds.

        Raises:
            EngineError: they do not fit the model, or the responses under way did not finish in time.
            WeightSyncError: other weights arrived than were sent, or they are another policy here.
        """
        await self.ready()
        async with self._gate.update(weights.version, drain_timeout_s=drain_timeout_s):
            if "weights" in self._freed:
                raise EngineError("the engine's weights are asleep; wake them before new ones are loaded")
            # Inside the gate: no request may enter before these are known to be the weights that were sent.
            checksum: str = await self._in_thread(self._load_weights, weights)
        return weights.version, checksum

    async def sleep(self, level: int = 1, drain_timeout_s: float = DRAIN_TIMEOUT_S) -> None:
        """Give the device's memory to others; requests are refused until both parts are awake again.

        Responses under way finish first.

        Args:
            level: 1 keeps the weights in the host's memory; 2 drops them, and with them the version.
            drain_timeout_s: deadline of the responses under way.

        Raises:
            EngineError: the engine is not idle in time.
        """
        async with self._part_lock:
            self._check_alive()
            if self._gate.asleep:
                return
            async with self._gate.sleep(drain_timeout_s=drain_timeout_s):
                self._freed = {"weights", "cache"}
                if level > 1:
                    self._gate.version, self._text = -1, None
                await self._in_thread(self._sleep, level)

    async def wake(self, part: EnginePart) -> None:
        """Take memory back: first for ``"weights"``, which may then be loaded, last for the ``"cache"``.

        Does nothing where the part is awake.

        Raises:
            EngineError: the memory is not free.
            WeightSyncError: the weights that were loaded meanwhile are another policy here.
        """
        async with self._part_lock:
            self._check_alive()
            if part in self._freed:
                await self._in_thread(self._wake, part)
                self._freed.remove(part)
                if not self._freed:
                    try:
                        await self._in_thread(self._compare_text)
                    except WeightSyncError:
                        self._gate.version = -1
                        raise
                self._gate.asleep = bool(self._freed)

    async def weight_version(self) -> int:
        """Version now held; -1 before the first ``load_weights``.

        Raises:
            EngineError: the engine failed, or hangs, and cannot serve any more.
        """
        self._check_alive()
        return self._gate.version

    async def report(self) -> dict[str, Any]:
        """Usage so far (:class:`EngineUsage`) and peak memory of the process (keys of ``peak_memory``)."""
        return {**asdict(self._usage), **peak_memory()}

    async def recorded_events(self, since: float, most: int) -> ProcessEvents:
        """Steps and calls of the thread; arguments as ``process_events``."""
        return process_events(since, most)

    async def shutdown(self) -> None:
        """Stop the thread and free the model; requests under way and calls that wait fail."""
        if self._thread is None:
            return
        self._failure = "it was shut down"
        self._inbox.put(None)
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)
        self._thread = None
        # The thread has ended, so what is still queued is answered here.
        while not self._inbox.empty():
            item = self._inbox.get_nowait()
            if isinstance(item, _Call):
                item.refuse(self._cannot_serve())
            elif item is not None:
                self._deliver(item, self._cannot_serve())

    @abstractmethod
    def _open(self) -> dict[str, Any]:
        """Load the model; return what ``ready`` returns."""

    @abstractmethod
    def _step(self, joining: list[Request]) -> list[Request]:
        """Take in ``joining``, sample one token (or more) for what runs; return the requests that finished."""

    @abstractmethod
    def _replace_weights(self, weights: Weights) -> tuple[str, str]:
        """Load the weights into the idle model.

        Returns:
            Checksum of the values that it then holds, and their arrangement (``WeightsChecksum``): as held where tensors are held
            as in a checkpoint, else as received.
        """

    @abstractmethod
    def _score(self, token_ids: np.ndarray) -> np.ndarray:
        """Log-probabilities float32 ``[P - 1]`` of tokens ``[P]`` but the first, by the idle model, without temperature."""

    @abstractmethod
    def _sleep(self, level: int) -> None:
        """Free the idle model's memory; level 1 keeps the weights on the host."""

    @abstractmethod
    def _wake(self, part: EnginePart) -> None:
        """Take back what :meth:`_sleep` freed."""

    @abstractmethod
    def _recover(self) -> None:
        """Forget every request after a failed step; raise when the engine cannot go on."""

    @abstractmethod
    def _close(self) -> None:
        """Free the model and every process."""

    def _load_weights(self, weights: Weights) -> str:
        checksum, arrangement = self._replace_weights(weights)
        _require_same(weights, checksum, arrangement)
        self._text = weights.text
        if not self._freed:
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
            raise EngineError(f"the engine cannot serve: a step has been running for {seconds:.0f} s")

    def _cannot_serve(self) -> EngineError:
        return EngineError(f"the engine cannot serve: {self._failure}")

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
        if self._thread is None:
            raise self._cannot_serve()
        call = _Call(function, args)
        self._inbox.put(call)
        return await asyncio.wrap_future(call.done)

    def _work(self) -> None:
        while True:
            items = self._take()
            joining = [request for item in items if isinstance(item, list) for request in item]
            self._in_flight.update(joining)
            calls = [item for item in items if isinstance(item, _Call)]
            if None in items:
                break
            for call in calls:
                name = call.function.__name__.strip("_").replace("_", " ")
                with event(name):
                    call.make()
                advance()
            if self._in_flight:
                self._advance(joining)
        self._fail_requests("the engine was shut down before the response was finished")
        for call in calls:
            call.refuse(self._cannot_serve())
        if self._info:  # else the model never came up, and there is nothing to free
            self._close()

    def _take(self) -> list[list[Request] | _Call | None]:
        """Empty the inbox, waiting for something only when no request runs."""
        items = [] if self._in_flight else [self._inbox.get()]
        while True:
            try:
                items.append(self._inbox.get_nowait())
            except queue.Empty:
                return items

    def _advance(self, joining: list[Request]) -> None:
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
        failed, self._in_flight = list(self._in_flight), set()
        self._loop.call_soon_threadsafe(self._deliver, failed, EngineError(reason))

    def _deliver(self, requests: list[Request], error: EngineError | None = None) -> None:
        """In the event loop: hand finished requests, or what became of them, to their clients."""
        self._gate.leave(len(requests))
        faults = {request: request.fault for request in requests}
        # Those without one first: they say that the weights of the others are not to blame.
        for request in sorted(requests, key=lambda request: faults[request] != ""):
            client = self._clients.pop(request)
            if error is not None:
                client.outbox.fail(client.number, error)
            elif faults[request]:
                client.outbox.fail(client.number, self._explained(faults[request], client.weight_version))
            else:
                self._answering_version = client.weight_version
                client.outbox.put(client.number, request.prompt_ids, request.response(client.weight_version))

    def _explained(self, fault: str, version: int) -> EngineError:
        wider = "set a dtype of wider range in engine_kwargs ('bfloat16', 'float32')"
        if self._answering_version == version:
            return EngineError(f"{fault}, which overflows: weights of version {version} answer other prompts; {wider}")
        return EngineError(
            f"{fault}, and weights of version {version} have answered no other yet. If they answer none, they are broken: lower lr "
            f"and continue from the last checkpoint; if they answer others, the prompt overflows: {wider}"
        )


def _require_same(sent: Weights, checksum: str, arrangement: str) -> None:
    """Compare what an engine has with what was sent.

    Raises:
        WeightSyncError: they differ.
    """
    if checksum != sent.checksum:
        raise WeightSyncError(
            f"version {sent.version} was sent with checksum {sent.checksum}, the engine has {checksum}; it serves none of them"
        )
    if arrangement != sent.arrangement:
        raise WeightSyncError(
            f"version {sent.version} was sent with names and places of digest {sent.arrangement}, the engine has {arrangement} of "
            "equal values: tensors changed their names or elements their places; it serves none of them"
        )
