"""Requests to engines (token ids) and responses (token ids, their log-probabilities and the version of the weights)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from random import Random
from typing import Literal

import numpy as np

from trial_ray.errors import EngineError

EnginePart = Literal["weights", "cache"]
"""Parts of an engine that release their memory while the engine sleeps, in the order in which they wake."""

FLOAT32_GAP = 1e-3
"""Largest allowed difference between the log-probabilities of engine and learner, in nats per token, if both compute in float32
or wider. Rounding causes differences of 1e-7 to 1e-5; see docs/decisions.md."""
LOW_PRECISION_GAP = 0.1
"""Largest allowed difference between the log-probabilities of engine and learner, in nats per token, if one of them computes in
bfloat16 or float16; see docs/decisions.md."""

MIN_TEMPERATURE = 0.01
"""Lowest temperature except 0; vLLM raises lower temperatures to this value without reporting it."""
MAX_TEMPERATURE = 2.0
"""Highest temperature; at a higher temperature, vLLM would fail a whole step with all of its requests."""
MAX_SEED = 2**63 - 1
"""Largest seed of a request, which is the largest seed of torch's generators."""


class InvalidRequestError(EngineError):
    """The request itself is invalid: any other engine of this model would reject it, too."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one response.

    Attributes:
        max_tokens: maximum number of tokens in a response, including its stop token.
        temperature: 0 for greedy decoding, otherwise from 0.01 to 2.
        top_p: total probability of the tokens to sample from (nucleus sampling), in (0, 1]; ignored by greedy decoding.
        seed: makes this response repeatable on one engine; ``None`` lets the engine choose.
        stop: strings that end the response; the token that completes a string is part of the response.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Response:
    """One sampled response.

    Attributes:
        response_ids: sampled tokens, int32 ``[y]``, including the stop token if one was sampled.
        logprobs: float32 ``[y]``, log-probability of each sampled token, in nats, under the distribution that it was sampled
            from: the softmax of ``logits / temperature``, with ``top_p < 1`` renormalised over the nucleus. For a greedy
            response, the model's own log-probabilities, without temperature.
        weight_version: version of the weights that sampled the response.
        finish_reason: ``"stop"`` or ``"length"``.
    """

    response_ids: np.ndarray
    logprobs: np.ndarray
    weight_version: int
    finish_reason: str


def is_whole(value: object) -> bool:
    """Return whether a value is a whole number; booleans do not count."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def check_sampling(params: SamplingParams) -> None:
    """Reject sampling parameters that no engine supports.

    Raises:
        InvalidRequestError: a value has the wrong type or is out of range.
    """
    if not is_whole(params.max_tokens) or params.max_tokens < 1:
        raise InvalidRequestError(f"max_tokens: expected a whole number of at least 1, got {params.max_tokens!r}.")
    if params.seed is not None and not (is_whole(params.seed) and 0 <= params.seed <= MAX_SEED):
        raise InvalidRequestError(f"seed: expected None or a whole number in [0, 2**63), got {params.seed!r}.")
    if not (isinstance(params.stop, tuple) and all(isinstance(text, str) and text for text in params.stop)):
        raise InvalidRequestError(f"stop: expected a tuple of texts, none of them empty, got {params.stop!r:.80}.")
    temperature, top_p = params.temperature, params.top_p
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (temperature, top_p))
    if not numbers or not (temperature == 0 or MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE) or not 0 < top_p <= 1:
        raise InvalidRequestError(
            f"Expected a temperature of 0 or in [{MIN_TEMPERATURE}, {MAX_TEMPERATURE}], and top_p in (0, 1]; got "
            f"temperature={temperature!r}, top_p={top_p!r}."
        )


def check_request(
    prompt_ids: np.ndarray, params: SamplingParams, *, max_model_len: int | None, vocab_size: int
) -> None:
    """Reject a request that no engine of this model could serve.

    Args:
        prompt_ids: token ids of the prompt.
        params: sampling parameters.
        max_model_len: maximum number of tokens of prompt and response together; ``None`` if unknown.
        vocab_size: exclusive upper bound of the token ids.

    Raises:
        InvalidRequestError: the prompt is empty, has ids outside the vocabulary or leaves no room for ``max_tokens``, or a
            sampling value has the wrong type or is out of range.
    """
    check_sampling(params)
    if prompt_ids.ndim != 1 or not prompt_ids.size or prompt_ids.dtype.kind not in "iu":
        raise InvalidRequestError(
            f"prompt_ids: expected at least one token as an integer array [P], got {prompt_ids.dtype} {prompt_ids.shape}."
        )
    if max_model_len is not None and prompt_ids.size + params.max_tokens > max_model_len:
        raise InvalidRequestError(
            f"A prompt of {prompt_ids.size} tokens and a response of up to {params.max_tokens} exceed "
            f"max_model_len={max_model_len}; shorten the prompt, lower max_tokens or raise the engine's max_model_len."
        )
    if prompt_ids.min() < 0 or prompt_ids.max() >= vocab_size:
        raise InvalidRequestError(f"prompt_ids: expected values in [0, {vocab_size}), got some outside.")


@dataclass(eq=False)
class Request:
    """State of one request while its response is sampled.

    Attributes:
        prompt_ids: token ids of the prompt, int ``[P]``.
        params: sampling parameters.
        reply: callback that receives the response, or an error instead.
        weight_version: version of the weights that sample the response.
        response_ids: tokens sampled so far; ``logprobs`` has one entry for each.
        finish_reason: reason why the response ended, such as ``"stop"``; empty while the request runs.
        cached_tokens: number of prompt tokens in the engine's prefix cache; ``None`` if the engine does not report it.
        aborted: whether the client no longer waits for the response.
    """

    prompt_ids: np.ndarray
    params: SamplingParams
    reply: Callable[[Response | EngineError], None] = lambda answer: None
    weight_version: int = 0
    response_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""
    cached_tokens: int | None = None
    aborted: bool = False

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the prompt and, so far, of the response."""
        return len(self.prompt_ids) + len(self.response_ids)

    @cached_property
    def random(self) -> Random:
        """Random number generator of this request."""
        return Random(None if self.params.seed is None else int(self.params.seed))

    def append(self, token: int, logprob: float, stop_ids: frozenset[int]) -> None:
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
    def overflow(self) -> str:
        """Error message if some token has no finite log-probability, because the model overflowed; empty otherwise."""
        for logprob in self.logprobs:
            if not math.isfinite(logprob):
                return f"the model gives a log-probability of {logprob} after a prompt of {len(self.prompt_ids)} tokens"
        return ""

    def response(self) -> Response:
        """Return the finished response.

        Raises:
            EngineError: a log-probability is not finite, because the model overflowed.
        """
        if self.overflow:
            raise EngineError(self.overflow)
        return Response(
            response_ids=np.asarray(self.response_ids, np.int32),
            logprobs=np.asarray(self.logprobs, np.float32),
            weight_version=self.weight_version,
            finish_reason=self.finish_reason,
        )


def overflow_error(request: Request, version_answers: bool) -> EngineError:
    """Return the error of a request for which the model computed a log-probability that is not finite.

    Args:
        request: the request.
        version_answers: whether weights of the request's version gave finite log-probabilities for another prompt.
    """
    overflow, version = request.overflow, request.weight_version
    wider = "set a dtype of wider range in engine_kwargs ('bfloat16', 'float32')"
    if version_answers:
        return EngineError(
            f"{overflow}: the prompt overflows, because weights of version {version} answered other prompts; {wider}"
        )
    return EngineError(
        f"{overflow}, and weights of version {version} have answered no other prompt yet. If every prompt fails, the weights are "
        f"broken: lower lr and continue from the last checkpoint. If others are answered, the prompt overflows: {wider}"
    )


@dataclass
class EngineUsage:
    """Usage of an engine, in training and evaluation.

    Attributes:
        busy_seconds: time spent in decoding steps.
        prompt_tokens: prompt tokens of finished requests.
        cached_tokens: prompt tokens that were in the engine's prefix cache; ``None`` if the engine does not report them.
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


class WeightLock:
    """Readers-writer lock of an engine's weights: responses are readers, a weight update is the writer.

    A writer waits for the running responses, which are not aborted; new responses wait for the writer and are sampled with the
    new weights. While the engine sleeps, readers are rejected instead of waiting, because a request to a sleeping engine is a
    mistake of the caller.

    Attributes:
        version: version of the weights; -1 if the engine has no weights.
        asleep: parts of the engine (weights, cache) that have released their memory; while there are any, readers are rejected.
        mutex: must be held to change ``version`` or ``asleep``.
    """

    def __init__(self) -> None:
        self.version = -1
        self.asleep: set[EnginePart] = set()
        self.mutex = asyncio.Lock()
        self._num_readers = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def acquire_read(self, count: int) -> int:
        """Keep the weights fixed for ``count`` responses until :meth:`release_read`; return the version of the weights.

        Raises:
            EngineError: no weights have been loaded yet, or the engine is asleep.
        """
        async with self.mutex:
            if self.asleep:
                raise EngineError("The engine is asleep: its GPU is the learner's until the update has ended.")
            if self.version < 0:
                raise EngineError("The engine has no weights of the learner yet; call load_weights before exchange.")
            self._num_readers += count
            self._idle.clear()
            return self.version

    def release_read(self, count: int) -> None:
        """Release the lock of ``count`` responses that have ended."""
        self._num_readers -= count
        if not self._num_readers:
            self._idle.set()

    @asynccontextmanager
    async def write(self, drain_timeout_s: float) -> AsyncIterator[None]:
        """Wait for the running responses, then exclude new ones inside the context.

        Raises:
            EngineError: the responses did not finish within ``drain_timeout_s`` seconds.
        """
        async with self.mutex:
            try:
                await asyncio.wait_for(self._idle.wait(), drain_timeout_s)
            except TimeoutError as error:
                raise EngineError(
                    f"{self._num_readers} responses did not finish within {drain_timeout_s:.0f} s; the engine must be idle first."
                ) from error
            yield
