"""Protocol between rollouts and engines: token ids in, token ids out, and the weight version of every sample.

An engine is a Ray actor with the methods of :class:`~trial_ray.engines.batching.BatchingEngine`; ``engines.vllm`` and
``engines.transformers`` implement it and pass one conformance suite. A message contains many requests or many answers, as bytes:
Ray's own pickler runs Python code for every array and every dataclass in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from trial_ray.errors import EngineError

EnginePart = Literal["weights", "cache"]
"""Memory that a sleeping engine releases, in the order of waking."""

MOST_IDS = 2**31
"""Exclusive upper bound of token ids, which are sent as int32."""
FLOAT32_GAP = 1e-3
"""Limit in nats per token for engine and learner in float32 or wider, which differ by 1e-7 to 1e-5; see docs/decisions.md."""
LOW_PRECISION_GAP = 0.1
"""Limit in nats per token if engine or learner computes in bfloat16 or float16; see docs/decisions.md."""


class InvalidRequestError(EngineError):
    """The request itself is invalid: any other engine of this model would reject it, too."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one response.

    Attributes:
        max_tokens: maximum number of tokens in a response, including its stop token.
        temperature: 0 for greedy decoding, otherwise 0.01 or more.
        top_p: nucleus mass; ignored by greedy decoding.
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
        response_ids: int32 ``[y]``, including the stop token if one was sampled.
        logprobs: float32 ``[y]``, log-probability of each sampled token, in nats, under the distribution that it was sampled
            from: the softmax of ``logits / temperature``, with ``top_p < 1`` renormalised over the nucleus. For a greedy
            response, the model's own log-probabilities, without temperature.
        weight_version: version of the weights that sampled it.
        finish_reason: ``"stop"`` or ``"length"``.
    """

    response_ids: np.ndarray
    logprobs: np.ndarray
    weight_version: int
    finish_reason: str


def is_whole(value: object) -> bool:
    """Return whether a value is a whole number; booleans are not."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


SentRequest = tuple[int, np.ndarray, SamplingParams]
"""A request in a message: the client's number for it, prompt ids, sampling parameters."""
SentAnswer = tuple[int, Response | EngineError]
"""An answer in a message: the number of the request, and its response or error."""
