"""Divergence from a frozen policy, for regularisation and for watching drift."""

from __future__ import annotations

from torch import Tensor

from trial_ray.objectives.checks import flat_floats, flat_mask
from trial_ray.objectives.segments import masked_mean, zero_outside


def k3_divergence(logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor, bound: float = 10.0) -> Tensor:
    """Token mean of the low-variance KL estimate k3 = exp(d) − d − 1, d = log π_ref − log π_θ, clamped to ±``bound``.

    It is never negative and, over samples of π_θ, unbiased for KL(π_θ ‖ π_ref) where the clamp does not act. A clamped
    token has no gradient.

    Args:
        logprobs: float ``[T]``, log π_θ in nats; the only argument that receives a gradient.
        reference_logprobs: float ``[T]``, log π_ref of the same tokens.
        mask: bool or 0/1 ``[T]``, tokens to average over.
        bound: largest value of a token, above 0.

    Returns:
        Shape (), in nats per token, 0 with a graph where the mask is empty.

    Raises:
        ValueError: wrong shape or dtype, NaN, or ``bound`` not above 0.
    """
    flat_floats("logprobs", logprobs)
    like = ("logprobs", logprobs)
    reference_logprobs = flat_floats("reference_logprobs", reference_logprobs, like).detach()
    mask = flat_mask("mask", mask, like)
    if not bound > 0:
        raise ValueError(f"bound must be above 0, got {bound}")
    # 20 is far beyond any bound in use, and keeps exp and its gradient finite.
    difference = zero_outside(reference_logprobs - logprobs, mask).clamp(-20, 20)
    return masked_mean((difference.exp() - difference - 1).clamp(-bound, bound), mask)
