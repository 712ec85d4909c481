"""Turn weights from hindsight log-ratios of tokens, which the TRIAL paper calls trajectory-relative allocation.

The T tokens of all K turns are concatenated. No result carries a gradient: the turn weights are fixed during the update.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trial_ray.objectives.segments import (
    flat_counts,
    flat_floats,
    flat_ids,
    flat_mask,
    renumber,
    segment_sum,
    zero_outside,
)

ZERO_GAP = 1e-8
"""If the mean turn score of a trajectory, in nats per token, is at most this, turns with tokens to learn from get weight 1."""


def hindsight_gap(hindsight_logprobs: Tensor, logprobs: Tensor, clip: float = 2.0) -> Tensor:
    """Signed hindsight log-ratio of each token (TRIAL paper, Eq. 4): Δ = sg[clip_c(log π_T(y|h⁺) − log π(y|h))].

    With log-probabilities of π_old it is Δ^old, which determines the turn weights; with log-probabilities of the current policy
    it is Δ^θ, which the dense loss uses.

    Args:
        hindsight_logprobs: float ``[T]``, log π_T(y|h⁺) in nats: the teacher's, with the teacher context in the prompt.
        logprobs: float ``[T]``, log π(y|h) of the same tokens, in nats.
        clip: c, the bound on the log-ratio, above 0.

    Returns:
        Float ``[T]`` in ``[−c, c]``, detached.

    Raises:
        ValueError: wrong shape or dtype, NaN, two equal infinities, or ``clip`` not above 0.
    """
    flat_floats("hindsight_logprobs", hindsight_logprobs)
    flat_floats("logprobs", logprobs, ("hindsight_logprobs", hindsight_logprobs))
    if not clip > 0:
        raise ValueError(f"clip must be above 0, got {clip}.")
    gap = hindsight_logprobs.detach() - logprobs.detach()
    if bool(gap.isnan().any()):
        raise ValueError("hindsight_logprobs and logprobs are infinite at the same token.")
    return gap.clamp(-clip, clip)


def turn_scores(gap: Tensor, mask: Tensor, turn_ids: Tensor, num_turns: int) -> tuple[Tensor, Tensor]:
    """Turn score (TRIAL paper, Eq. 5): s_k = (1/n_k) Σ_t m_kt |Δ^old_kt|.

    Args:
        gap: float ``[T]``, the hindsight log-ratios Δ^old in nats.
        mask: bool or 0/1 ``[T]``, m, the tokens to learn from.
        turn_ids: integer ``[T]`` in ``[0, num_turns)``, the turn of each token.
        num_turns: K, the number of turns.

    Returns:
        ``scores`` float ``[K]``, nats per token, 0 for a turn without tokens to learn from, detached; and ``counts`` int64
        ``[K]``, n_k, the number of tokens to learn from in each turn.

    Raises:
        ValueError: wrong shape or dtype, NaN, ids out of range, or a negative ``num_turns``.
    """
    gap = flat_floats("gap", gap).detach()
    mask = flat_mask("mask", mask, ("gap", gap))
    if num_turns < 0:
        raise ValueError(f"num_turns must not be negative, got {num_turns}.")
    turn_ids = flat_ids("turn_ids", turn_ids, ("gap", gap), num_turns)
    counts = segment_sum(mask.long(), turn_ids, num_turns)
    totals = segment_sum(zero_outside(gap.abs(), mask), turn_ids, num_turns)
    return totals / counts.clamp(min=1), counts


def relative_weights(scores: Tensor, counts: Tensor, trajectory_ids: Tensor) -> Tensor:
    """TRIAL's turn weight (TRIAL paper, Eq. 6): w_k = s_k / s̄_τ, with s̄_τ the token-weighted mean score of the trajectory.

    Turn k has n_k tokens to learn from. The mean weight over these tokens of a trajectory is 1: Σ_k n_k w_k = Σ_k n_k. In a
    trajectory with numerically zero log-ratios (s̄_τ ≤ ``ZERO_GAP``), every turn with n_k > 0 has weight 1. A turn with n_k = 0 has
    weight 0.

    Args:
        scores: float ``[K]``, the turn scores s_k ≥ 0.
        counts: ``[K]``, n_k, the number of tokens to learn from in each turn, of any dtype.
        trajectory_ids: integer ``[K]``, from 0, in any order; turns with the same id form a trajectory.

    Returns:
        Float ``[K]`` in the dtype of ``scores``, detached.

    Raises:
        ValueError: wrong shape or dtype, NaN, negative scores, counts or ids.
    """
    scores, counts, trajectories, num_trajectories = _check_turns(scores, counts, trajectory_ids)
    tokens = segment_sum(counts, trajectories, num_trajectories).clamp(min=1)
    mean_scores = (segment_sum(counts * scores, trajectories, num_trajectories) / tokens)[trajectories]
    weights = torch.where(mean_scores > ZERO_GAP, scores / mean_scores, 1.0)
    return zero_outside(weights, counts > 0)


def uniform_weights(scores: Tensor, counts: Tensor, trajectory_ids: Tensor) -> Tensor:
    """Weight 1 for every turn with tokens to learn from and 0 for other turns: a control experiment for TRIAL's turn weights.

    Arguments, result and errors are as in ``relative_weights``.
    """
    scores, counts, _, _ = _check_turns(scores, counts, trajectory_ids)
    return (counts > 0).to(scores.dtype)


def permuted_weights(scores: Tensor, counts: Tensor, trajectory_ids: Tensor, generator: torch.Generator) -> Tensor:
    """TRIAL's turn weights, exchanged between the turns of a trajectory: a control experiment for these weights.

    Within a trajectory, the turns with tokens to learn from are put in a random cyclic order, and each gets the weight of the next
    one; only a single such turn keeps its own weight, 1. All weights of a trajectory are then multiplied by one factor, so that
    their token-weighted mean is 1 again.

    Args:
        scores: float ``[K]``, the turn scores s_k ≥ 0.
        counts: ``[K]``, n_k, the number of tokens to learn from in each turn, of any dtype.
        trajectory_ids: integer ``[K]``, from 0, in any order.
        generator: the only source of randomness.

    Returns:
        Float ``[K]`` in the dtype of ``scores``, detached.

    Raises:
        ValueError: as in ``relative_weights``.
    """
    weights = relative_weights(scores, counts, trajectory_ids)
    scores, counts, trajectories, num_trajectories = _check_turns(scores, counts, trajectory_ids)
    active = (counts > 0).nonzero().squeeze(1)
    keys = torch.rand(len(active), generator=generator, device=generator.device, dtype=torch.float64)
    shuffled = active[keys.to(active.device).argsort()]
    order = shuffled[trajectories[shuffled].argsort(stable=True)]
    num_active = torch.unique_consecutive(trajectories[order], return_counts=True)[1].tolist()
    permuted = weights.clone()
    for turns in order.split(num_active):  # `turns` are one trajectory's turns with tokens to learn from.
        permuted[turns] = weights[turns.roll(-1)]
    tokens = segment_sum(counts, trajectories, num_trajectories)
    mass = segment_sum(counts * permuted, trajectories, num_trajectories)
    # `mass` is a trajectory's sum of token weights. It is 0 only without tokens to learn from; the weights then stay 0.
    factor = torch.where(mass > 0, tokens / mass, 1.0)
    return permuted * factor[trajectories]


def _check_turns(scores: Tensor, counts: Tensor, trajectory_ids: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return scores, token counts in their dtype, trajectory ids renumbered from 0 without gaps, and the number of trajectories."""
    scores = flat_floats("scores", scores).detach()
    counts = flat_counts("counts", counts, ("scores", scores))
    ids = flat_ids("trajectory_ids", trajectory_ids, ("scores", scores))
    if not bool(((scores >= 0) & scores.isfinite()).all()):
        raise ValueError("scores must be finite and not negative.")
    return scores, counts, *renumber(ids)
