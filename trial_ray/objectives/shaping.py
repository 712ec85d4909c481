"""Gate, scale and bound of the terms by which ADRS (arXiv 2608.03223) changes token advantages towards the teacher."""

from __future__ import annotations

import torch
from torch import Tensor

from trial_ray.objectives.segments import flat_floats, flat_ids, flat_mask, renumber, segment_sum, zero_outside


def teacher_gates(
    hindsight_logprobs: Tensor, mask: Tensor, turn_ids: Tensor, rewards: Tensor, group_ids: Tensor, slope: float = 2.0
) -> Tensor:
    """ADRS's gate g = σ(τ TVA) of each turn's group; above ½ if turns with a higher teacher log-probability have higher rewards.

    TVA = E[R | likely under the teacher] − E[R | unlikely under the teacher]. The expectations are means of the reward R over the
    turns of the group, weighted by α and by 1 − α, with α_k = σ(ℓ_k − ℓ̄). ℓ_k is the mean log-probability of turn k's tokens
    under the teacher, and ℓ̄ the mean of ℓ_k over the turns of all groups.

    Args:
        hindsight_logprobs: float ``[T]``, log π_T(y|h⁺) in nats: the teacher's, with the teacher context in the prompt.
        mask: bool or 0/1 ``[T]``, tokens to learn from.
        turn_ids: integer ``[T]`` in ``[0, K)``, the turn of each token.
        rewards: float ``[K]``, reward R of each turn, minus the penalty if its action is invalid.
        group_ids: integer ``[K]``, from 0, the group of each turn.
        slope: τ, at least 0.

    Returns:
        Float ``[K]`` in (0, 1) in the dtype of ``rewards``, detached; ½ in a group of one turn.

    Raises:
        ValueError: wrong shape or dtype, NaN, an id out of range, or a negative ``slope``.
    """
    like = ("hindsight_logprobs", flat_floats("hindsight_logprobs", hindsight_logprobs))
    mask, rewards = flat_mask("mask", mask, like), flat_floats("rewards", rewards).detach()
    turns = flat_ids("turn_ids", turn_ids, like, len(rewards))
    groups, count = renumber(flat_ids("group_ids", group_ids, ("rewards", rewards)))
    if not slope >= 0:
        raise ValueError(f"slope must be at least 0, got {slope}.")
    lengths = segment_sum(mask.to(rewards.dtype), turns, len(rewards)).clamp(min=1)
    logprobs = zero_outside(hindsight_logprobs.detach(), mask).to(rewards.dtype)
    means = segment_sum(logprobs, turns, len(rewards)) / lengths
    distances = means - means.mean()
    # sigmoid(-x) is 1 - sigmoid(x), but does not round to 0 where sigmoid(x) rounds to 1.
    weights = torch.sigmoid(distances), torch.sigmoid(-distances)
    values = [segment_sum(w * rewards, groups, count) / segment_sum(w, groups, count) for w in weights]
    return torch.sigmoid(slope * (values[0] - values[1]))[groups]


def scaled_terms(terms: Tensor, mask: Tensor, group_ids: Tensor, epsilon: float = 1e-8) -> Tensor:
    """Divide ADRS's terms, whose mean in each turn is 0, by their standard deviation in the group: x / √(Σ x² / (n − 1) + ε).

    Args:
        terms: float ``[T]``, ADRS's term in the advantage of each token; 0 outside the mask.
        mask: bool or 0/1 ``[T]``, 1 for the n tokens of each group that have a term.
        group_ids: integer ``[T]``, from 0, the group of each token.
        epsilon: ε, above 0.

    Returns:
        Float ``[T]``, detached.

    Raises:
        ValueError: wrong shape or dtype, NaN, a negative id, or ``epsilon`` not above 0.
    """
    like = ("terms", flat_floats("terms", terms))
    mask, (groups, count) = flat_mask("mask", mask, like), renumber(flat_ids("group_ids", group_ids, like))
    if not epsilon > 0:
        raise ValueError(f"epsilon must be above 0, got {epsilon}.")
    terms = terms.detach()
    others = (segment_sum(mask.to(terms.dtype), groups, count) - 1).clamp(min=1)
    return terms / (segment_sum(terms.square(), groups, count) / others + epsilon).sqrt()[groups]


def term_bounds(rewards: Tensor, group_ids: Tensor, bound: float, epsilon: float = 1e-6) -> Tensor:
    """Bound of ADRS's (arXiv 2608.03223) advantage terms in each group: b · min(1, σ / (median σ + ε)).

    σ is the standard deviation of the rewards in the group, and the median is over all groups.

    Args:
        rewards: float ``[K]``, reward R of each turn, minus the penalty if its action is invalid.
        group_ids: integer ``[K]``, from 0, the group of each turn.
        bound: b, above 0.
        epsilon: ε, above 0; a group with σ < ε does not count in the median.

    Returns:
        Float ``[K]``, detached; 0 in a group with σ < ε, and in a group of one turn. As in ADRS's released code, a group of
        one turn has σ = 1 in the median.

    Raises:
        ValueError: wrong shape or dtype, NaN, a negative id, or ``bound`` or ``epsilon`` not above 0.
    """
    rewards = flat_floats("rewards", rewards).detach()
    groups, count = renumber(flat_ids("group_ids", group_ids, ("rewards", rewards)))
    for name, value in (("bound", bound), ("epsilon", epsilon)):
        if not value > 0:
            raise ValueError(f"{name} must be above 0, got {value}.")
    sizes = segment_sum(torch.ones_like(rewards), groups, count)
    centred = rewards - (segment_sum(rewards, groups, count) / sizes)[groups]
    variances = segment_sum(centred.square(), groups, count) / (sizes - 1).clamp(min=1)
    deviations = torch.where(sizes > 1, variances.sqrt(), torch.ones_like(sizes))
    differ = deviations >= epsilon
    if not bool(differ.any()):
        return torch.zeros_like(rewards)
    shares = (deviations / (deviations[differ].median() + epsilon)).clamp(max=1)
    return (bound * zero_outside(shares, differ & (sizes > 1)))[groups]
