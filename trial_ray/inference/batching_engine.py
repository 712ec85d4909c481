"""What both engines share: one thread that batches, and coroutines that feed it."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from trial_ray.errors import EngineError
from trial_ray.inference.admission import AdmissionGate, check_request
from trial_ray.inference.outbox import Outbox
from trial_ray.inference.protocol import EnginePart, RequestBatch, Response, ResponseBatch, SamplingParams
from trial_ray.inference.weights import Weights
from trial_ray.process_memory import peak_memory
from trial_ray.process_progress import advance, announce

STEP_TIMEOUT_S = 300.0
"""A step that takes longer hangs: the engine then says that it cannot serve, and is replaced."""
DRAIN_TIMEOUT_S = 600.0
"""Deadline of the responses under way before weights change or the engine sleeps."""


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

    def response(self, weight_version: int) -> Response:
        """The finished response, as sampled by weights of this version."""
        return Response(
            response_ids=np.asarray(self.response_ids, np.int32),
            logprobs=np.asarray(self.logprobs, np.float32),
            weight_version=weight_version,
            finish_reason=self.finish_reason,
        )


@dataclass
class EngineUsage:
    """What an engine has done, in training and evaluation.

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
        """Count a step."""
        self.busy_seconds += seconds
        for request in finished:
            self.prompt_tokens += len(request.prompt_ids)
            self.response_tokens += len(request.response_ids)
            if request.cached_tokens is not None:
                self.cached_tokens = (self.cached_tokens or 0) + request.cached_tokens


@dataclass(frozen=True)
class _Client:
    """Who waits for a request, and which weights it began with."""

    outbox: Outbox
    number: int
    weight_version: int


@dataclass(eq=False)
class _Call:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    done: asyncio.Future[Any]


class BatchingEngine(ABC):
    """Answers to ``EngineProtocol``; subclasses say how a model starts, advances and takes weights.

    Everything that touches the model runs in one thread, between two steps, so the actor's event loop always answers.
    Methods with an underscore that subclasses implement are called in that thread only.

    Args:
        max_model_len: most tokens of prompt and response together.
    """

    def __init__(self, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self._gate = AdmissionGate()
        self._freed: set[EnginePart] = set()
        self._inbox: queue.SimpleQueue[list[Request] | _Call | None] = queue.SimpleQueue()
        self._in_flight: set[Request] = set()
        self._clients: dict[Request, _Client] = {}
        self._outboxes: dict[str, Outbox] = {}
        self._admitting: set[asyncio.Task[None]] = set()
        self._thread: threading.Thread | None = None
        self._opening: asyncio.Task[dict[str, Any]] | None = None
        self._info: dict[str, Any] = {}
        self._failure = "it was not started; call ready first"
        self._step_began: float | None = None
        self._usage = EngineUsage()

    async def ready(self) -> dict[str, Any]:
        """Start the engine (idempotent); see ``EngineProtocol``."""
        if self._opening is None:
            self._opening = asyncio.create_task(self._start())
        return {**await asyncio.shield(self._opening), "pid": os.getpid()}

    async def exchange(self, client: str, requests: RequestBatch) -> ResponseBatch:
        """Take further requests of a client, return what has finished; see ``EngineProtocol``."""
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
        self._inbox.put([request for _, request in admitted])

    async def load_weights(self, weights: Weights, drain_timeout_s: float = DRAIN_TIMEOUT_S) -> str:
        """Let responses under way finish, then replace the weights; see ``EngineProtocol``.

        Raises:
            EngineError: the weights do not fit the model, or the responses under way did not finish in time.
        """
        await self.ready()
        self._check_alive()
        async with self._gate.update(weights.version, drain_timeout_s=drain_timeout_s):
            if "weights" in self._freed:
                raise EngineError("the engine's weights are asleep; wake them before new ones are loaded")
            checksum: str = await self._in_thread(self._replace_weights, weights)
            return checksum

    async def sleep(self, level: int = 1, drain_timeout_s: float = DRAIN_TIMEOUT_S) -> None:
        """Let responses under way finish, then free the device's memory; see ``EngineProtocol``."""
        self._check_alive()
        if self._gate.asleep:
            return
        async with self._gate.sleep(drain_timeout_s=drain_timeout_s):
            self._freed = {"weights", "cache"}
            if level > 1:
                self._gate.version = -1
            await self._in_thread(self._sleep, level)

    async def wake(self, part: EnginePart) -> None:
        """Take memory back; see ``EngineProtocol``."""
        self._check_alive()
        if part in self._freed:
            await self._in_thread(self._wake, part)
            self._freed.remove(part)
            self._gate.asleep = bool(self._freed)

    async def weight_version(self) -> int:
        """Version now held; -1 before the first ``load_weights``.

        Raises:
            EngineError: the engine failed, or hangs, and cannot serve any more.
        """
        self._check_alive()
        return self._gate.version

    async def report(self) -> dict[str, Any]:
        """What the engine has done so far (:class:`EngineUsage`) and its process's peak memory; see ``EngineProtocol``."""
        return {**asdict(self._usage), **asdict(peak_memory())}

    async def shutdown(self) -> None:
        """Stop the thread and free the model; requests under way fail."""
        if self._thread is None:
            return
        self._failure = "it was shut down"
        self._inbox.put(None)
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)
        self._thread = None

    @abstractmethod
    def _open(self) -> dict[str, Any]:
        """Load the model; return what ``ready`` returns."""

    @abstractmethod
    def _step(self, joining: list[Request]) -> list[Request]:
        """Take in ``joining``, sample one token (or more) for what runs; return the requests that finished."""

    @abstractmethod
    def _replace_weights(self, weights: Weights) -> str:
        """Load the weights into the idle model; return the checksum of what it then holds."""

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

    def _check_alive(self) -> None:
        if self._failure:
            raise EngineError(f"the engine cannot serve: {self._failure}")
        # The event loop answers even where the thread that computes hangs.
        began = self._step_began
        if began is not None and (seconds := time.monotonic() - began) > STEP_TIMEOUT_S:
            raise EngineError(f"the engine cannot serve: a step has been running for {seconds:.0f} s")

    async def _start(self) -> dict[str, Any]:
        announce()
        self._loop = asyncio.get_running_loop()
        # A daemon: an actor that Ray ends must not wait for it.
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()
        self._info = await self._in_thread(self._open)
        self._failure = ""
        return self._info

    async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        call = _Call(function, args, asyncio.get_running_loop().create_future())
        self._inbox.put(call)
        return await call.done

    def _work(self) -> None:
        while True:
            items = self._take()
            joining = [request for item in items if isinstance(item, list) for request in item]
            self._in_flight.update(joining)
            if None in items:
                break
            for call in items:
                if isinstance(call, _Call):
                    self._run_call(call)
            if self._in_flight:
                self._advance(joining)
        if self._info:  # else the model never came up, and there is nothing to free
            self._close()
        self._fail_requests("the engine was shut down before the response was finished")

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
        advance("step")
        if finished:
            self._in_flight.difference_update(finished)
            self._loop.call_soon_threadsafe(self._deliver, finished)

    def _fail_requests(self, reason: str) -> None:
        failed, self._in_flight = list(self._in_flight), set()
        self._loop.call_soon_threadsafe(self._deliver, failed, EngineError(reason))

    def _deliver(self, requests: list[Request], error: EngineError | None = None) -> None:
        """In the event loop: hand finished requests, or what became of them, to their clients."""
        self._gate.leave(len(requests))
        for request in requests:
            client = self._clients.pop(request)
            if error is None:
                client.outbox.put(client.number, request.prompt_ids, request.response(client.weight_version))
            else:
                client.outbox.fail(client.number, error)

    def _run_call(self, call: _Call) -> None:
        try:
            result = call.function(*call.args)
            advance(call.function.__name__.removeprefix("_"))
        except Exception as error:  # raised again where the call was made
            self._post(call.done, error)
        else:
            self._loop.call_soon_threadsafe(_set_result, call.done, result)

    def _post(self, done: asyncio.Future[Any], error: Exception) -> None:
        self._loop.call_soon_threadsafe(_set_exception, done, error)


def _set_result(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
