"""Surrogates over whole responses of turns: ratios of responses (GSPO), means over responses (GRPO, Dr. GRPO)."""

from __future__ import annotations

from torch import Tensor

from trial_ray.objectives.choices import SURROGATE_MEANS, SurrogateMean
from trial_ray.objectives.segments import flat_floats, flat_ids, flat_mask, masked_mean, segment_sum, zero_outside


def sequence_log_ratios(log_ratio: Tensor, mask: Tensor, turn_ids: Tensor, num_turns: int) -> Tensor:
    """Log-ratio of each token's response, GSPO: log s_k = (1/n_k) Σ_t m_t log r_t, the same for all tokens of a turn.

    Args:
        log_ratio: float ``[T]``, log r_t = log π_θ − log π_old; receives a gradient.
        mask: bool or 0/1 ``[T]``, tokens to learn from; n_k of them in turn k.
        turn_ids: integer ``[T]`` in ``[0, num_turns)``, the turn of each token.
        num_turns: K.

    Returns:
        Float ``[T]``; 0 in a turn without eligible tokens.

    Raises:
        ValueError: wrong shape or dtype, NaN, or an id out of range.
    """
    like = ("log_ratio", flat_floats("log_ratio", log_ratio))
    mask = flat_mask("mask", mask, like)
    turns = flat_ids("turn_ids", turn_ids, like, num_turns)
    counts = segment_sum(mask.to(log_ratio.dtype), turns, num_turns)
    sums = segment_sum(zero_outside(log_ratio, mask), turns, num_turns)
    return (sums / counts.clamp(min=1))[turns]


def surrogate_mean(
    losses: Tensor, mask: Tensor, turn_ids: Tensor, num_turns: int, mean: SurrogateMean, length: int
) -> Tensor:
    """Mean of token losses l_t over the K turns of one microbatch that have an eligible token.

    ``"tokens"``: (1/M) Σ m l over the M eligible tokens. ``"rows"``: (1/K) Σ_k (1/n_k) Σ_t m l, each response counts the same
    (GRPO as published, GSPO). ``"fixed_length"``: (1/(K L)) Σ m l, each token counts the same for any response length (Dr. GRPO).

    Args:
        losses: float ``[T]``; receives a gradient.
        mask: bool or 0/1 ``[T]``, tokens to learn from.
        turn_ids: integer ``[T]`` in ``[0, num_turns)``, the turn of each token.
        num_turns: number of turns, K of which have an eligible token.
        mean: one of ``SURROGATE_MEANS``.
        length: L, in tokens, at least 1: the maximum response length.

    Returns:
        Shape (), 0 with a graph if the mask is empty.

    Raises:
        ValueError: wrong shape or dtype, NaN, an id out of range, an unknown ``mean``, or ``length`` below 1.
    """
    like = ("losses", flat_floats("losses", losses))
    mask = flat_mask("mask", mask, like)
    turns = flat_ids("turn_ids", turn_ids, like, num_turns)
    if mean not in SURROGATE_MEANS:
        raise ValueError(f"mean must be one of {', '.join(SURROGATE_MEANS)}, got {mean!r}.")
    if not length >= 1:
        raise ValueError(f"length must be at least 1, got {length}.")
    if mean == "tokens":
        return masked_mean(losses, mask)
    losses = zero_outside(losses, mask)
    counts = segment_sum(mask.to(losses.dtype), turns, num_turns)
    num_eligible = max(int((counts > 0).sum()), 1)
    if mean == "fixed_length":
        return losses.sum() / (length * num_eligible)
    return (segment_sum(losses, turns, num_turns) / counts.clamp(min=1)).sum() / num_eligible
