"""Requests inside an engine: validation, admission between weight updates, and answers in batches."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from random import Random

import numpy as np

from trial_ray.engines.protocol import (
    MOST_IDS,
    EnginePart,
    InvalidRequestError,
    Response,
    SamplingParams,
    SentAnswer,
    is_whole,
)
from trial_ray.errors import EngineError

#: vLLM raises any lower temperature than this, 0 apart, without saying so in its response.
MIN_TEMPERATURE = 0.01
#: vLLM rejects any higher temperature, in a step that would fail with all of its requests.
MAX_TEMPERATURE = 2.0
MOST_SEEDS = 2**63
"""Exclusive upper bound of seeds; torch's generators accept no larger values."""


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
        abandoned: whether the client no longer waits for the response.
    """

    prompt_ids: np.ndarray
    params: SamplingParams
    reply: Callable[[Response | EngineError], None] = lambda answer: None
    weight_version: int = 0
    response_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""
    cached_tokens: int | None = None
    abandoned: bool = False

    @cached_property
    def random(self) -> Random:
        """Random number generator of this request."""
        return Random(None if self.params.seed is None else int(self.params.seed))

    def take(self, token: int, logprob: float, stop_ids: frozenset[int]) -> None:
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
    def fault(self) -> str:
        """Error message if the model overflowed and some token has no finite log-probability; empty otherwise."""
        wrong = next((logprob for logprob in self.logprobs if not math.isfinite(logprob)), None)
        if wrong is None:
            return ""
        return f"the model gives a log-probability of {wrong} after a prompt of {len(self.prompt_ids)} tokens"

    def response(self) -> Response:
        """Return the finished response.

        Raises:
            EngineError: the request has a :attr:`fault`.
        """
        if self.fault:
            raise EngineError(self.fault)
        return Response(
            response_ids=np.asarray(self.response_ids, np.int32),
            logprobs=np.asarray(self.logprobs, np.float32),
            weight_version=self.weight_version,
            finish_reason=self.finish_reason,
        )


def overflow_error(request: Request, version_answers: bool) -> EngineError:
    """Return the error of a request with a :attr:`Request.fault`.

    Args:
        request: the request.
        version_answers: whether the same weights have answered another prompt.
    """
    fault, version = request.fault, request.weight_version
    wider = "set a dtype of wider range in engine_kwargs ('bfloat16', 'float32')"
    if version_answers:
        return EngineError(
            f"{fault}: the prompt overflows, because weights of version {version} answered other prompts; {wider}"
        )
    return EngineError(
        f"{fault}, and weights of version {version} have answered no other prompt yet. If every prompt fails, the weights are "
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


class AdmissionGate:
    """Keeps responses and weight updates apart: each response is sampled under one version of the weights.

    A weight update holds the gate. Running responses finish first (they are not aborted), and new requests wait at the gate and
    are sampled under the new version. While the engine sleeps, requests are rejected instead: a caller that sends one then has
    the wrong order of calls, and would wait for an update.

    Attributes:
        version: version of the weights; -1 if the engine has no weights.
        asleep: parts that have released their memory; requests are rejected while any part is asleep.
        lock: taken to change ``version`` or ``asleep``.
    """

    def __init__(self) -> None:
        self.version = -1
        self.asleep: set[EnginePart] = set()
        self.lock = asyncio.Lock()
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def enter(self, count: int) -> int:
        """Keep the weights fixed for ``count`` responses, until :meth:`leave`; return the version of the weights.

        Raises:
            EngineError: no weights have been loaded yet, or the engine is asleep.
        """
        async with self.lock:
            if self.asleep:
                raise EngineError("The engine is asleep: its GPU is the learner's until the update has ended.")
            if self.version < 0:
                raise EngineError("The engine has no weights of the learner yet; call load_weights before exchange.")
            self._in_flight += count
            self._idle.clear()
            return self.version

    def leave(self, count: int) -> None:
        """Report that ``count`` responses have finished."""
        self._in_flight -= count
        if not self._in_flight:
            self._idle.set()

    @asynccontextmanager
    async def held(self, drain_timeout_s: float) -> AsyncIterator[None]:
        """Hold back new requests inside the context, which is entered once the running responses have finished.

        Raises:
            EngineError: the responses did not finish within ``drain_timeout_s`` seconds.
        """
        async with self.lock:
            try:
                await asyncio.wait_for(self._idle.wait(), drain_timeout_s)
            except TimeoutError as error:
                raise EngineError(
                    f"{self._in_flight} responses did not finish within {drain_timeout_s:.0f} s; the engine must be idle first."
                ) from error
            yield


def check_request(
    prompt_ids: np.ndarray, params: SamplingParams, *, max_model_len: int | None, vocab_size: int | None
) -> None:
    """Reject a request that no engine of this model could serve.

    Args:
        prompt_ids: token ids of the prompt.
        params: sampling parameters.
        max_model_len: maximum number of tokens of prompt and response together; ``None`` if unknown.
        vocab_size: exclusive upper bound of the token ids; ``None`` if unknown.

    Raises:
        InvalidRequestError: the prompt is empty, has ids outside the vocabulary or leaves no room for ``max_tokens``, or a
            sampling value has the wrong type or is out of range.
    """
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError(f"params: expected SamplingParams, got {type(params).__name__}.")
    if not is_whole(params.max_tokens) or params.max_tokens < 1:
        raise InvalidRequestError(f"max_tokens: expected a whole number of at least 1, got {params.max_tokens!r}.")
    if params.seed is not None and not (is_whole(params.seed) and 0 <= params.seed < MOST_SEEDS):
        raise InvalidRequestError(f"seed: expected None or a whole number in [0, 2**63), got {params.seed!r}.")
    if not (isinstance(params.stop, tuple) and all(isinstance(each, str) and each for each in params.stop)):
        raise InvalidRequestError(f"stop: expected a tuple of texts, none of them empty, got {params.stop!r:.80}.")
    known = all(
        isinstance(value, (int, float)) and math.isfinite(value) for value in (params.temperature, params.top_p)
    )
    tempered = known and (params.temperature == 0 or MIN_TEMPERATURE <= params.temperature <= MAX_TEMPERATURE)
    if not tempered or not 0 < params.top_p <= 1:
        raise InvalidRequestError(
            f"Expected a temperature of 0 or in [{MIN_TEMPERATURE}, {MAX_TEMPERATURE}], and top_p in (0, 1]; got "
            f"temperature={params.temperature!r}, top_p={params.top_p!r}."
        )
    if not isinstance(prompt_ids, np.ndarray) or prompt_ids.ndim != 1:
        raise InvalidRequestError(f"prompt_ids: expected an array [P], got {prompt_ids!r:.80}.")
    if not (length := len(prompt_ids)):
        raise InvalidRequestError("prompt_ids: expected at least one token, got none.")
    if prompt_ids.dtype.kind not in "iu":
        raise InvalidRequestError(f"prompt_ids: expected an integer type, got {prompt_ids.dtype}.")
    if max_model_len is not None and length + params.max_tokens > max_model_len:
        raise InvalidRequestError(
            f"A prompt of {length} tokens and a response of up to {params.max_tokens} exceed max_model_len={max_model_len}; "
            "shorten the prompt, lower max_tokens or raise the engine's max_model_len."
        )
    vocab_size = vocab_size or MOST_IDS
    if prompt_ids.min() < 0 or prompt_ids.max() >= vocab_size:
        raise InvalidRequestError(f"prompt_ids: expected values in [0, {vocab_size}), got some outside.")


FETCH_TIMEOUT_S = 60.0
"""Seconds after which a waiting client gets an empty reply and calls again."""
FORGET_AFTER_S = 600.0
"""Seconds without a call after which a client counts as gone; its finished answers are dropped."""


class Outbox:
    """Answers to one client, kept from the step in which a response finishes until the client's next call.

    Attributes:
        running: requests without an answer, by their numbers.
    """

    def __init__(self) -> None:
        self.running: dict[int, Request] = {}
        self._answers: list[SentAnswer] = []
        self._waiting: asyncio.Future[None] | None = None
        self._asked_at = time.monotonic()

    @property
    def is_abandoned(self) -> bool:
        """True if the client has not called for more than :data:`FORGET_AFTER_S` seconds."""
        return self._waiting is None and time.monotonic() - self._asked_at > FORGET_AFTER_S

    def put(self, number: int, answer: Response | EngineError) -> None:
        """Add the answer to request ``number``: the response, or the error that replaces it."""
        self.running.pop(number, None)
        self._answers.append((number, answer))
        self._wake()

    async def take(self) -> list[SentAnswer]:
        """Return all answers, waiting for the first if necessary; return an empty list if the client calls again before that."""
        self._wake()
        self._asked_at = time.monotonic()
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


class Outboxes(dict[str, Outbox]):
    """The outboxes of an engine's clients, by the clients' names."""

    def of(self, client: str) -> Outbox:
        """Return the outbox of a client; a new client replaces the clients that are gone."""
        if client not in self:
            for name in [name for name, outbox in self.items() if outbox.is_abandoned]:
                del self[name]
            self[client] = Outbox()
        return self[client]

    def abandon(self, client: str, numbers: Collection[int] | None) -> list[Request]:
        """Mark requests as abandoned and return them; arguments as in ``BatchingEngine.abandon``."""
        abandoned = []
        for name, outbox in self.items():
            if name.startswith(client):
                chosen = list(outbox.running) if numbers is None else numbers
                abandoned += [outbox.running.pop(number) for number in chosen if number in outbox.running]
        for request in abandoned:
            request.abandoned = True
        return abandoned
