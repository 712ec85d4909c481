"""Whether an engine computes the policy that it was sent: log-probabilities of a fixed text, the learner's beside the engine's.

A checksum confirms the numbers that an engine holds, not what it does with them: kernels may want them in another layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trial_ray.errors import WeightSyncError

TEXT = (
    "You are in the middle of a room. Looking around you, you see a cabinet 2, a cabinet 1, a drawer 1, a fridge 1 and a "
    "countertop 1. Your task is to: put a clean mug on the desk.\n> go to cabinet 1\nThe cabinet 1 is closed."
)
"""Ordinary text, of ordinary log-probabilities: those of random tokens would differ more by rounding alone."""
MOST_TOKENS = 48
TEXT_FACTOR = 3
"""Multiple of the limit on sampled tokens: others are less probable, and differ more by rounding (SmolLM2-135M in bfloat16 by 0.05
nats instead of 0.03)."""


@dataclass(frozen=True)
class TextLogprobs:
    """Log-probabilities of a text under the weights that are sent, as their sender computes them.

    Attributes:
        token_ids: int32 ``[P]``.
        logprobs: float32 ``[P - 1]``, of every token but the first after those before it, in nats.
        limit: mean difference from which on an engine's are those of another policy, in nats.
        model: class of the model, for messages.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    limit: float
    model: str


def text_ids(tokenizer: Any) -> np.ndarray:
    """The tokens of the text, int32 ``[P]``, two at least."""
    ids = np.asarray(tokenizer.encode(TEXT, add_special_tokens=False)[:MOST_TOKENS], np.int32)
    return ids if len(ids) > 1 else np.zeros(2, np.int32)


@torch.no_grad()
def own_logprobs(model: Any, token_ids: np.ndarray, last: int | None = None) -> np.ndarray:
    """Log-probabilities by a transformers model's own forward pass, without cache.

    Args:
        model: in evaluation mode.
        token_ids: int32 ``[P]``.
        last: of so many tokens at the end; ``None``: of all but the first.

    Returns:
        float32 ``[last]``, in nats.
    """
    last = len(token_ids) - 1 if last is None else last
    ids = torch.from_numpy(token_ids).long().to(model.device)[None]
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=last + 1).logits[0, -last - 1 : -1]
    logprobs = torch.log_softmax(logits.float(), -1).gather(-1, ids[0, -last:, None])
    found: np.ndarray = logprobs[:, 0].cpu().numpy()
    return found


def require_agreement(expected: TextLogprobs, logprobs: np.ndarray, engine: str) -> None:
    """Compare an engine's log-probabilities, of the first tokens at least, with the sender's.

    Where those of the sender are no numbers, its weights are broken: others say so.

    Raises:
        WeightSyncError: the engine computes another policy.
    """
    theirs = expected.logprobs[: len(logprobs)]
    gap = float(np.abs(logprobs - theirs).mean())
    if np.isfinite(theirs).all() and not gap <= expected.limit:
        advice = "; set engine='transformers'" if engine == "vllm" else ""
        raise WeightSyncError(
            f"the engine holds the weights that were sent, but computes another policy of them: log-probabilities of a fixed text "
            f"differ by {gap:.3g} nats a token on average (limit {expected.limit:g}, {TEXT_FACTOR} times max_logprob_gap). The "
            f"engine {engine!r} cannot take new weights of {expected.model}{advice}"
        )
