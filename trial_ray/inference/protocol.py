"""The contract between rollouts and engines: token ids in, token ids out, every sample stamped with its weights.

An engine is a Ray actor. ``EngineProtocol`` lists its methods; ``vllm_engine`` and ``transformers_engine`` implement
it and pass one conformance suite.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from trial_ray.errors import EngineError
from trial_ray.inference.weights import WeightShards


class InvalidRequestError(EngineError):
    """The request itself is wrong: any other engine of this model would refuse it too."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a response is sampled.

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


class EngineProtocol(Protocol):
    """What every engine actor answers to. All methods are coroutines on the actor."""

    async def ready(self) -> dict[str, Any]:
        """Start the engine (idempotent); return ``{"engine", "model", "vocab_size", "stop_token_ids", "pid"}``."""
        ...

    async def generate(self, prompt_ids: np.ndarray, params: SamplingParams) -> Response:
        """Sample one response to one prompt; many calls run concurrently and are batched inside.

        Raises:
            InvalidRequestError: the prompt is empty or does not fit with its response, or a sampling value is out of
                range.
            EngineError: no weights were loaded yet, or the engine failed.
        """
        ...

    async def load_weights(self, shards: WeightShards) -> str:
        """Replace the weights, drop every cached prefix, adopt the shards' version.

        Responses under way finish first, under the weights they began with; requests that come meanwhile wait.

        Returns:
            ``weights_checksum`` of what the engine now holds.
        """
        ...

    async def weight_version(self) -> int:
        """Version now held; -1 before the first ``load_weights``."""
        ...

    async def report(self) -> dict[str, Any]:
        """Counts since the start (fields of ``EngineUsage``) and peak memory (fields of ``PeakMemory``)."""
        ...

    async def shutdown(self) -> None:
        """Stop every process and free every device that the engine holds."""
        ...
