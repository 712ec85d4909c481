"""Losses over flat tensors of tokens, and importance weights for the mismatch between the engine's policy and the learner's."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from trial_ray.objectives import IMPORTANCE_MODES, SURROGATE_MEANS, ImportanceMode, SurrogateMean
from trial_ray.objectives.segments import (
    flat_floats,
    flat_ids,
    flat_mask,
    masked_mean,
    scalar,
    segment_sum,
    zero_outside,
)

LOG_RATIO_BOUND = 20.0
"""Largest log-ratio that is exponentiated, in nats. It is far above any clip range, and its exponential and gradient are finite
in float32 (e⁸⁹ is infinite)."""


def bounded_ratio(log_ratio: Tensor) -> Tensor:
    """Ratio of two probabilities, exp(min(log_ratio, 20)); its gradient is 0 if log_ratio exceeds 20."""
    return log_ratio.clamp(max=LOG_RATIO_BOUND).exp()


def clipped_losses(
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Tensor:
    """Clipped surrogate max(−A r, −A clip(r, 1 − low, 1 + high)) of each token, with r = π_θ / π_old.

    With ``dual_clip`` d, a token with A < 0 contributes at most −d A, for any ratio. The ratio is always bounded to e²⁰, and a
    token at that bound has no gradient.

    Args:
        log_ratio: float ``[T]``, log r of each token or of its whole response; the only argument that receives a gradient.
        advantages: float ``[T]``, Â of each token's rollout.
        mask: bool or 0/1 ``[T]``, tokens to learn from.
        clip_low: lower clip range, in [0, 1].
        clip_high: upper clip range, at least 0.
        dual_clip: d, above 1, or ``None`` for no dual clip.

    Returns:
        Float ``[T]``; 0 outside the mask.

    Raises:
        ValueError: wrong shape or dtype, NaN, or a clip out of range.
    """
    like = ("log_ratio", flat_floats("log_ratio", log_ratio))
    advantages = flat_floats("advantages", advantages, like).detach()
    mask = flat_mask("mask", mask, like)
    _check_clips(clip_low, clip_high)
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip must be above 1, got {dual_clip}.")
    # Mask before exp and products: infinite values outside the mask would give inf · 0 in the backward pass.
    ratio = bounded_ratio(zero_outside(log_ratio, mask))
    advantages = zero_outside(advantages, mask)
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    if dual_clip is not None:
        losses = torch.where(advantages < 0, torch.minimum(losses, -dual_clip * advantages), losses)
    return losses


def cispo_losses(
    log_ratio: Tensor,
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Tensor:
    """CISPO's loss −sg[clip(r, 1 − low, 1 + high)] A log π_θ of each token (MiniMax-M1, arXiv 2506.13585).

    Every token keeps its gradient, with a bounded weight; in :func:`clipped_losses`, a clipped token has no gradient.

    Args:
        log_ratio: float ``[T]``, log r = log π_θ − log π_old.
        logprobs: float ``[T]``, log π_θ in nats; the only argument that receives a gradient.
        advantages: float ``[T]``, Â of each token's rollout.
        mask: bool or 0/1 ``[T]``, tokens to learn from.
        clip_low: lower clip range, in [0, 1].
        clip_high: upper clip range, at least 0.

    Returns:
        Float ``[T]``; 0 outside the mask.

    Raises:
        ValueError: wrong shape or dtype, NaN, or a clip out of range.
    """
    like = ("logprobs", flat_floats("logprobs", logprobs))
    log_ratio = flat_floats("log_ratio", log_ratio, like).detach()
    advantages = flat_floats("advantages", advantages, like).detach()
    mask = flat_mask("mask", mask, like)
    _check_clips(clip_low, clip_high)
    weights = bounded_ratio(log_ratio).clamp(1 - clip_low, 1 + clip_high)
    return -zero_outside(weights * advantages, mask) * zero_outside(logprobs, mask)


def sapo_losses(
    log_ratio: Tensor, advantages: Tensor, mask: Tensor, temperatures: Sequence[float] = (1.0, 1.05)
) -> Tensor:
    """SAPO's loss −(4 / τ) σ(τ (r − 1)) A of each token (arXiv 2511.20347): a soft gate of slope 1 at r = 1 replaces the clip.

    Args:
        log_ratio: float ``[T]``, log r = log π_θ − log π_old; the only argument that receives a gradient.
        advantages: float ``[T]``, Â of each token's rollout.
        mask: bool or 0/1 ``[T]``, tokens to learn from.
        temperatures: τ for A > 0, and τ for the other tokens; above 0.

    Returns:
        Float ``[T]``; 0 outside the mask.

    Raises:
        ValueError: wrong shape or dtype, NaN, or ``temperatures`` not above 0.
    """
    like = ("log_ratio", flat_floats("log_ratio", log_ratio))
    mask = flat_mask("mask", mask, like)
    advantages = zero_outside(flat_floats("advantages", advantages, like).detach(), mask)
    if not all(temperature > 0 for temperature in temperatures):
        raise ValueError(f"temperatures must be above 0, got {temperatures}.")
    positive, other = advantages.new_tensor(temperatures)
    slopes = torch.where(advantages > 0, positive, other)
    ratio = bounded_ratio(zero_outside(log_ratio, mask))
    return -4 / slopes * torch.sigmoid(slopes * (ratio - 1)) * advantages


def _check_clips(clip_low: float, clip_high: float) -> None:
    if not 0 <= clip_low <= 1:
        raise ValueError(f"clip_low must be in [0, 1], got {clip_low}.")
    if not clip_high >= 0:
        raise ValueError(f"clip_high must be at least 0, got {clip_high}.")


def dense_hindsight_loss(logprobs: Tensor, gap: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    """L_dense (TRIAL paper, Eq. 7): −(1/M) Σ m w Δ^θ log π_θ(y|h), with M the number of tokens in the mask.

    A positive log-ratio Δ^θ raises the probability of the sampled token, a negative log-ratio lowers it. With w = 1 and an
    unclipped log-ratio, the loss has the sampled reverse-KL gradient of on-policy self-distillation.

    Args:
        logprobs: float ``[T]``, log π_θ in nats; the only argument that receives a gradient.
        gap: float ``[T]``, hindsight log-ratio Δ^θ in nats.
        weights: float ``[T]``, weight w of each token's turn.
        mask: bool or 0/1 ``[T]``, m, tokens of the microbatch to learn from.

    Returns:
        Shape (); 0, with an autograd graph, if the mask is empty.

    Raises:
        ValueError: wrong shape or dtype, or NaN.
    """
    like = ("logprobs", flat_floats("logprobs", logprobs))
    gap = flat_floats("gap", gap, like).detach()
    weights = flat_floats("weights", weights, like).detach()
    # Mask the product: outside the mask it may be NaN (infinity times 0), which weighted_likelihood_loss() would reject.
    product = zero_outside(weights * gap, flat_mask("mask", mask, like))
    return weighted_likelihood_loss(logprobs, product, mask)


def weighted_likelihood_loss(logprobs: Tensor, coefficients: Tensor, mask: Tensor) -> Tensor:
    """Weighted negative log-likelihood: −(1/M) Σ m c log π_θ(y|h), with M the number of tokens in the mask.

    Args:
        logprobs: float ``[T]``, log π_θ in nats; the only argument that receives a gradient.
        coefficients: float ``[T]``, weight c of each token.
        mask: bool or 0/1 ``[T]``, m.

    Returns:
        Shape (); 0, with an autograd graph, if the mask is empty.

    Raises:
        ValueError: wrong shape or dtype, or NaN.
    """
    flat_floats("logprobs", logprobs)
    like = ("logprobs", logprobs)
    coefficients = flat_floats("coefficients", coefficients, like).detach()
    mask = flat_mask("mask", mask, like)
    return -masked_mean(zero_outside(coefficients, mask) * logprobs, mask)


def joint_loss(
    outcome_loss: Tensor, surrogate_loss: Tensor, dense_loss: Tensor, coefficient: float, alpha: float
) -> tuple[Tensor, Tensor]:
    """L (TRIAL paper, Eq. 8): L_out + clip_b(λ L_dense), with b = α · sg|L_GRPO|, for the scalar losses of one microbatch.

    A dense term that reaches a boundary, |λ L_dense| ≥ b, is saturated: it contributes its clamped value and no gradient. This
    includes a term exactly at the boundary and, if b = 0, every term, except during warm-up (λ = 0). The gradient of the outcome
    loss is never changed, and no gradient flows through the bound.

    Args:
        outcome_loss: shape (), L_out, the surrogate with regularisation.
        surrogate_loss: shape (), L_GRPO, the surrogate alone.
        dense_loss: shape (), L_dense.
        coefficient: λ, finite, at least 0 (0 during warm-up).
        alpha: α, at least 0; infinity disables the clamp.

    Returns:
        The loss, shape (); and whether the dense term is saturated, bool of shape ().

    Raises:
        ValueError: wrong shape or dtype, NaN, or a negative ``coefficient`` or ``alpha``.
    """
    scalar("outcome_loss", outcome_loss)
    scalar("surrogate_loss", surrogate_loss)
    scalar("dense_loss", dense_loss)
    if not (coefficient >= 0 and math.isfinite(coefficient)):
        raise ValueError(f"coefficient must be finite and at least 0, got {coefficient}.")
    if not alpha >= 0:
        raise ValueError(f"alpha must be at least 0, got {alpha}.")
    dense, magnitude = coefficient * dense_loss, surrogate_loss.detach().abs()
    # Without this case, an infinite alpha times a loss of 0 would be NaN.
    bound = torch.full_like(magnitude, math.inf) if math.isinf(alpha) else alpha * magnitude
    saturated = (dense.detach().abs() >= bound) & (coefficient > 0)
    return outcome_loss + torch.where(saturated, dense.detach().clamp(-bound, bound), dense), saturated


def sequence_log_ratios(log_ratio: Tensor, mask: Tensor, turn_ids: Tensor, num_turns: int) -> Tensor:
    """GSPO's log-ratio of each token's response: log s_k = (1/n_k) Σ_t m_t log r_t, the same for all tokens of a turn.

    Args:
        log_ratio: float ``[T]``, log r_t = log π_θ − log π_old; receives a gradient.
        mask: bool or 0/1 ``[T]``, tokens to learn from; n_k of them in turn k.
        turn_ids: integer ``[T]`` in ``[0, num_turns)``, the turn of each token.
        num_turns: number of turns.

    Returns:
        Float ``[T]``; 0 in a turn without tokens in the mask.

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
    """Mean of the token losses l_t of one microbatch, in which K turns have tokens in the mask m.

    M is the number of tokens in the mask, and n_k the number of these tokens in turn k.

    - ``"tokens"``: (1/M) Σ m l, so all tokens have equal weights.
    - ``"rows"`` (the GRPO paper, GSPO): (1/K) Σ_k (1/n_k) Σ_t m l, so all responses have equal weights.
    - ``"fixed_length"`` (Dr. GRPO): (1/(K L)) Σ m l, so a token has the same weight in a short and in a long response.

    Args:
        losses: float ``[T]``, l; the only argument that receives a gradient.
        mask: bool or 0/1 ``[T]``, tokens to learn from.
        turn_ids: integer ``[T]`` in ``[0, num_turns)``, the turn of each token.
        num_turns: number of turns, including turns without tokens in the mask.
        mean: one of ``SURROGATE_MEANS``.
        length: L, in tokens, at least 1: the maximum response length.

    Returns:
        Shape (); 0, with an autograd graph, if the mask is empty.

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
        cap: bound on the ratio, at least 1; no weight exceeds e²⁰, see :func:`bounded_ratio`.
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
