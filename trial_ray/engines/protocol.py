"""Requests and responses: token ids in; token ids, their log-probabilities and the weight version out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from trial_ray.errors import EngineError

EnginePart = Literal["weights", "cache"]
"""Memory that a sleeping engine releases, in the order of waking."""

FLOAT32_GAP = 1e-3
"""Limit in nats per token for engine and learner in float32 or wider, which differ by 1e-7 to 1e-5; see docs/decisions.md."""
LOW_PRECISION_GAP = 0.1
"""Limit in nats per token if engine or learner computes in bfloat16 or float16; see docs/decisions.md."""

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
    if not is_whole(params.max_tokens) or params.max_tokens < 1:
        raise InvalidRequestError(f"max_tokens: expected a whole number of at least 1, got {params.max_tokens!r}.")
    if params.seed is not None and not (is_whole(params.seed) and 0 <= params.seed <= MAX_SEED):
        raise InvalidRequestError(f"seed: expected None or a whole number in [0, 2**63), got {params.seed!r}.")
    if not (isinstance(params.stop, tuple) and all(isinstance(text, str) and text for text in params.stop)):
        raise InvalidRequestError(f"stop: expected a tuple of texts, none of them empty, got {params.stop!r:.80}.")
    temperature, top_p = params.temperature, params.top_p
    if not (temperature == 0 or MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE) or not 0 < top_p <= 1:
        raise InvalidRequestError(
            f"Expected a temperature of 0 or in [{MIN_TEMPERATURE}, {MAX_TEMPERATURE}], and top_p in (0, 1]; got "
            f"temperature={temperature!r}, top_p={top_p!r}."
        )
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
