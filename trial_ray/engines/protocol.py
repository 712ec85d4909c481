"""The contract between rollouts and engines: token ids in, token ids out, every sample stamped with its weights.

An engine is a Ray actor with the methods of :class:`~trial_ray.engines.batching.BatchingEngine`; ``engines.vllm`` and
``engines.transformers`` are such, and pass one conformance suite.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
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
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None


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


def prompt_digest(prompt_ids: np.ndarray) -> int:
    """Digest of a prompt; a response carries it so that the client can match them."""
    return zlib.crc32(np.ascontiguousarray(prompt_ids, np.int32).tobytes())


@dataclass(frozen=True, slots=True)
class RequestBatch:
    """The requests of one message; their arrays are joined, because many small ones are slow to send.

    Attributes:
        numbers: the client's own, by which it knows each response.
        prompt_ids: int32, the prompts one after the other.
        lengths: of each prompt, in tokens.
        params: of each request.
    """

    numbers: tuple[int, ...] = ()
    prompt_ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    lengths: tuple[int, ...] = ()
    params: tuple[SamplingParams, ...] = ()

    @classmethod
    def join(cls, requests: Sequence[tuple[int, np.ndarray, SamplingParams]]) -> RequestBatch:
        """One batch of requests, each (number, prompt ids, params)."""
        if not requests:
            return cls()
        numbers, prompts, params = zip(*requests, strict=True)
        joined = np.concatenate(prompts, dtype=np.int32, casting="same_kind")
        return cls(numbers, joined, tuple(map(len, prompts)), params)

    def split(self) -> list[tuple[int, np.ndarray, SamplingParams]]:
        """Inverse of :meth:`join`."""
        return list(zip(self.numbers, _cut(self.prompt_ids, self.lengths), self.params, strict=True))


@dataclass(frozen=True, slots=True)
class ResponseBatch:
    """The responses of one message, arrays joined as in :class:`RequestBatch`.

    Attributes:
        numbers: of the requests that were answered.
        response_ids: int32, the responses one after the other.
        logprobs: float32, beside ``response_ids``.
        lengths: of each response, in tokens.
        weight_versions: of each response.
        finish_reasons: of each response.
        prompt_digests: :func:`prompt_digest` of the prompt that each response continues.
        failed: what became of the other requests, by number.
    """

    numbers: tuple[int, ...]
    response_ids: np.ndarray
    logprobs: np.ndarray
    lengths: tuple[int, ...]
    weight_versions: tuple[int, ...]
    finish_reasons: tuple[str, ...]
    prompt_digests: tuple[int, ...]
    failed: dict[int, EngineError]

    def split(self) -> list[tuple[int, Response]]:
        """The responses, each with its number."""
        arrays = zip(_cut(self.response_ids, self.lengths), _cut(self.logprobs, self.lengths), strict=True)
        rest = zip(self.numbers, arrays, self.weight_versions, self.finish_reasons, strict=True)
        return [(number, Response(*pair, version, reason)) for number, pair, version, reason in rest]


def _cut(joined: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
    parts, start = [], 0
    for length in lengths:
        parts.append(joined[start : start + length])
        start += length
    return parts
