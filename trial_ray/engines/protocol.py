"""The contract between rollouts and engines: token ids in, token ids out, every sample stamped with its weights.

An engine is a Ray actor with the methods of :class:`~trial_ray.engines.batching.BatchingEngine`; ``engines.vllm`` and
``engines.transformers`` are such, and pass one conformance suite. A message holds many requests, or what became of them, as bytes:
Ray's own pickler runs Python for every array and every dataclass in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from trial_ray.errors import EngineError

EnginePart = Literal["weights", "cache"]
"""Memory that a sleeping engine releases, in the order of waking."""

MOST_IDS = 2**31
"""Token ids travel as int32."""
FLOAT32_GAP = 1e-3
"""Engine and learner in float32 or more differ by 1e-7 to 1e-5 nats a token; see docs/decisions.md."""
LOW_PRECISION_GAP = 0.1
"""Where one of them computes in bfloat16 or float16; see docs/decisions.md."""


class InvalidRequestError(EngineError):
    """The request itself is wrong: any other engine of this model would refuse it too."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one response.

    Attributes:
        max_tokens: most tokens in a response, its stop token included.
        temperature: 0 is greedy; else 0.01 or more.
        top_p: nucleus mass; a greedy response ignores it.
        seed: makes this one response repeatable on one engine; ``None`` lets the engine choose.
        stop: strings that end the response with the token that completes one, which belongs to it.
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
        response_ids: int32 ``[y]``, the stop token included where one was sampled.
        logprobs: float32 ``[y]``, log-probability of each sampled token, in nats, under the distribution that it was
            sampled from: the softmax of ``logits / temperature``, with ``top_p < 1`` renormalised over the nucleus. Those
            of a greedy response are the model's own, without temperature.
        weight_version: version of the weights that sampled it.
        finish_reason: ``"stop"`` or ``"length"``.
    """

    response_ids: np.ndarray
    logprobs: np.ndarray
    weight_version: int
    finish_reason: str


def is_whole(value: object) -> bool:
    """Whether a value is a whole number; a truth value is none."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


SentRequest = tuple[int, np.ndarray, SamplingParams]
"""A request in a message: the client's number of it, prompt ids, how to sample."""
SentAnswer = tuple[int, Response | EngineError]
"""What became of the request of this number."""
