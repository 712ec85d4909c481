"""What an engine may answer: nothing that it was not asked for, and nothing that no engine samples, reaches a rollout."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trial_ray.errors import EngineError
from trial_ray.inference.protocol import MOST_IDS, Response, ResponseBatch, is_whole

FINISH_REASONS = ("stop", "length")
_WHOLE_NUMBERS = ("numbers", "lengths", "weight_versions", "prompt_digests")
MAX_LOGPROB = 0.01
"""Log-probabilities are at most 0; kernels of low precision round to a little more."""


class WrongAnswerError(EngineError):
    """An engine answered outside its contract; nothing of the answer is used."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What an answer to a request is compared with.

    Attributes:
        prompt_digest: of the request's prompt.
        max_tokens: most tokens of the response.
        vocab_size: token ids are below it; ``None`` where it is not known.
    """

    prompt_digest: int
    max_tokens: int
    vocab_size: int | None


def require_consistent(answers: object) -> ResponseBatch:
    """Check that the parts of a message belong together, without which no response of it can be told from another.

    Raises:
        WrongAnswerError: they do not; says which.
    """
    if not isinstance(answers, ResponseBatch):
        raise WrongAnswerError(f"the engine answered with a {type(answers).__name__}, expected a ResponseBatch")
    parts = {name: getattr(answers, name) for name in (*_WHOLE_NUMBERS, "finish_reasons")}
    for name, values in parts.items():
        if not isinstance(values, tuple):
            raise WrongAnswerError(f"{name} of the engine's answer are a {type(values).__name__}, expected a tuple")
        if name in _WHOLE_NUMBERS and not all(map(is_whole, values)):
            raise WrongAnswerError(f"{name} of the engine's answer are {values!r:.200}, expected whole numbers")
        if len(values) != len(answers.numbers):
            raise WrongAnswerError(f"the engine answered {len(answers.numbers)} requests with {len(values)} {name}")
    _check_failed(answers.failed)
    if len({*answers.numbers, *answers.failed}) < len(answers.numbers) + len(answers.failed):
        raise WrongAnswerError(
            f"the engine answered a request twice: {answers.numbers!r:.200} and failed {list(answers.failed)!r:.200}"
        )
    if min(answers.lengths, default=0) < 0:
        raise WrongAnswerError(f"the engine answered with a response of {min(answers.lengths)} tokens")
    total = sum(answers.lengths)
    for name, kind in (("response_ids", np.integer), ("logprobs", np.floating)):
        values = getattr(answers, name)
        if not (isinstance(values, np.ndarray) and values.shape == (total,) and np.issubdtype(values.dtype, kind)):
            described = (
                f"{values.dtype} {list(values.shape)}" if isinstance(values, np.ndarray) else type(values).__name__
            )
            raise WrongAnswerError(f"{name} of the engine's answer are {described}, expected {kind.__name__} [{total}]")
    return answers


def _check_failed(failed: object) -> None:
    if not isinstance(failed, dict):
        raise WrongAnswerError(f"failed of the engine's answer is a {type(failed).__name__}, expected a dict")
    for number, error in failed.items():
        if not (is_whole(number) and isinstance(error, EngineError)):
            raise WrongAnswerError(
                f"failed of the engine's answer holds {number!r:.80}: {error!r:.80}, expected a whole number and an EngineError"
            )


def wrong_answer(response: Response, prompt_digest: int, asked: Asked) -> WrongAnswerError | None:
    """What is wrong with a response to a request; ``None`` where nothing is."""
    ids, logprobs = response.response_ids, response.logprobs
    if prompt_digest != asked.prompt_digest:
        return WrongAnswerError("the engine answered to another prompt")
    if not 1 <= len(ids) <= asked.max_tokens:
        return WrongAnswerError(f"the response has {len(ids)} tokens, expected 1 to {asked.max_tokens}")
    highest = asked.vocab_size or MOST_IDS
    if ids.min() < 0 or ids.max() >= highest:
        outside = ids[(ids < 0) | (ids >= highest)][0]
        return WrongAnswerError(f"the response holds token id {outside}, expected 0 to {highest - 1}")
    if not (np.isfinite(logprobs).all() and logprobs.max() <= MAX_LOGPROB):
        found = logprobs[~(np.isfinite(logprobs) & (logprobs <= MAX_LOGPROB))][0]
        return WrongAnswerError(
            f"the response has a log-probability of {found}, expected a finite number of at most 0. Where every "
            f"response has NaN, weights of version {response.weight_version} give no probabilities: lower lr and continue from "
            "the last checkpoint; where some have it, their prompts overflow the engine's dtype"
        )
    if response.finish_reason not in FINISH_REASONS:
        return WrongAnswerError(f"the response ended by {response.finish_reason!r}, expected one of {FINISH_REASONS}")
    if response.weight_version < 0:
        return WrongAnswerError(f"the response is of weights of version {response.weight_version}, expected 0 or more")
    return None
