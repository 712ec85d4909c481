"""State of a request inside an engine, and the usage that finished requests add up to."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from random import Random

import numpy as np

from trial_ray.engines.protocol import Response, SamplingParams
from trial_ray.errors import EngineError


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
            EngineError: the model overflowed.
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
    """Return the error of a request in which the model overflowed.

    Args:
        request: the request.
        version_answers: whether the same weights have answered another prompt.
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
