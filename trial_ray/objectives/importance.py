"""Ratios of probabilities: their bound, truncated importance weights, effective sample size."""

from __future__ import annotations

from torch import Tensor

from trial_ray.objectives.checks import flat_floats

LOG_RATIO_BOUND = 20.0
"""Largest log-ratio that is exponentiated, in nats: far beyond any clip, and finite in float32 with its gradient (e⁸⁹ is not)."""


def bounded_ratio(log_ratio: Tensor) -> Tensor:
    """exp(min(log_ratio, 20)): the ratio of two probabilities; at the bound it has no gradient."""
    return log_ratio.clamp(max=LOG_RATIO_BOUND).exp()


def truncated_importance_weights(logprobs: Tensor, behaviour_logprobs: Tensor, cap: float) -> Tensor:
    """w_t = min(π_old(y_t) / π_engine(y_t), cap), detached: truncated importance sampling, token by token.

    Args:
        logprobs: float ``[T]``, the learner's log π_old of the sampled tokens, in nats.
        behaviour_logprobs: float ``[T]``, what the engine reported for them.
        cap: largest weight, at least 1; above e²⁰ the bound of :func:`bounded_ratio` is the largest.

    Returns:
        Float ``[T]``, in [0, cap].

    Raises:
        ValueError: wrong shape or dtype, NaN, or ``cap`` below 1.
    """
    if not cap >= 1:
        raise ValueError(f"cap must be at least 1, got {cap}")
    return bounded_ratio(_log_ratio(logprobs, behaviour_logprobs)).clamp(max=cap)


def effective_sample_size(logprobs: Tensor, behaviour_logprobs: Tensor) -> Tensor:
    """(Σ r)² / (T Σ r²) of the raw ratios r = π_old / π_engine: the share of the T tokens that the others are worth.

    1 where all ratios are equal, 1 / T where one of them outweighs the others.

    Args:
        logprobs: float ``[T]``, T at least 1, the learner's log π_old of the sampled tokens, in nats.
        behaviour_logprobs: float ``[T]``, what the engine reported for them.

    Returns:
        Float64, shape (), in (0, 1].

    Raises:
        ValueError: wrong shape or dtype, or NaN.
    """
    difference = _log_ratio(logprobs, behaviour_logprobs).double()
    # In logarithms, so that no ratio is too large for its square.
    size = 2 * difference.logsumexp(0) - (2 * difference).logsumexp(0)
    return size.exp() / difference.numel()


def _log_ratio(logprobs: Tensor, behaviour_logprobs: Tensor) -> Tensor:
    flat_floats("logprobs", logprobs)
    behaviour_logprobs = flat_floats("behaviour_logprobs", behaviour_logprobs, ("logprobs", logprobs))
    return (logprobs - behaviour_logprobs).detach()
