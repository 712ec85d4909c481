"""Importance weights between the learner's policy before the update and the engine's policy."""

from __future__ import annotations

from torch import Tensor

from trial_ray.objectives import IMPORTANCE_MODES, ImportanceMode
from trial_ray.objectives.losses import bounded_ratio
from trial_ray.objectives.segments import flat_floats, flat_ids, segment_sum


def importance_weights(
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    turn_ids: Tensor,
    num_turns: int,
    cap: float,
    mode: ImportanceMode = "token_truncate",
) -> Tensor:
    """Weight w_t of each token, detached, from the ratio ρ_t = π_old(y_t) / π_engine(y_t).

    In the ``sequence`` modes, ρ_t is the ratio of the turn's whole response, the product over its tokens. In the ``truncate``
    modes, w_t = min(ρ_t, cap). In the ``mask`` modes, w_t = ρ_t if ρ_t is at most the cap, else 0.

    Args:
        logprobs: float ``[T]``, the learner's log π_old of the sampled tokens, in nats.
        behaviour_logprobs: float ``[T]``, the engine's log-probabilities of these tokens.
        turn_ids: integer ``[T]`` in ``[0, num_turns)``, the turn of each token; all tokens of a turn must be present.
        num_turns: number of turns.
        cap: bound on the ratio, at least 1; no weight exceeds e²⁰, see :func:`~trial_ray.objectives.losses.bounded_ratio`.
        mode: one of ``IMPORTANCE_MODES``.

    Returns:
        Float ``[T]`` in the dtype of ``logprobs``, in [0, cap].

    Raises:
        ValueError: wrong shape or dtype, NaN, an id out of range, ``cap`` below 1, or an unknown ``mode``.
    """
    if not cap >= 1:
        raise ValueError(f"cap must be at least 1, got {cap}.")
    if mode not in IMPORTANCE_MODES:
        raise ValueError(f"mode must be one of {', '.join(IMPORTANCE_MODES)}, got {mode!r}.")
    log_ratio = _log_ratio(logprobs, behaviour_logprobs)
    turns = flat_ids("turn_ids", turn_ids, ("logprobs", logprobs), num_turns)
    if mode.startswith("sequence"):
        # Add up in float64: a float32 sum over thousands of tokens depends on their order.
        log_ratio = segment_sum(log_ratio.double(), turns, num_turns)[turns]
    if mode.endswith("truncate"):
        weights = bounded_ratio(log_ratio).clamp(max=cap)
    else:
        weights = bounded_ratio(log_ratio).masked_fill(log_ratio.exp() > cap, 0.0)
    return weights.to(logprobs.dtype)


def effective_sample_size(logprobs: Tensor, behaviour_logprobs: Tensor) -> Tensor:
    """Effective sample size per token: (Σ r)² / (T Σ r²) of the raw ratios r = π_old / π_engine.

    It is 1 if all ratios are equal, and close to 1 / T if one ratio is much larger than all others.

    Args:
        logprobs: float ``[T]``, T at least 1, the learner's log π_old of the sampled tokens, in nats.
        behaviour_logprobs: float ``[T]``, the engine's log-probabilities of these tokens.

    Returns:
        Float64, shape (), in (0, 1].

    Raises:
        ValueError: wrong shape or dtype, or NaN.
    """
    difference = _log_ratio(logprobs, behaviour_logprobs).double()
    # Compute in logarithms: the square of a large ratio would be infinite.
    size = 2 * difference.logsumexp(0) - (2 * difference).logsumexp(0)
    return size.exp() / difference.numel()


def _log_ratio(logprobs: Tensor, behaviour_logprobs: Tensor) -> Tensor:
    flat_floats("logprobs", logprobs)
    behaviour_logprobs = flat_floats("behaviour_logprobs", behaviour_logprobs, ("logprobs", logprobs))
    return (logprobs - behaviour_logprobs).detach()
