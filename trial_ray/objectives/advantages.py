"""Advantages of rollouts, turns and tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from trial_ray.objectives import ADVANTAGE_ESTIMATORS, AdvantageEstimator, equal_up_to_rounding
from trial_ray.objectives.losses import LOG_RATIO_BOUND
from trial_ray.objectives.segments import flat_counts, flat_floats, flat_ids, renumber, segment_sum, zero_outside

MIN_PENALTY_UNIT = 1.0
"""Lower bound on the divisor that converts penalties to advantages: the deviation of a group's returns plus ε or, with the
estimator ``"max_rl"``, their mean; see docs/decisions.md."""

VARIANCE_EPSILON = 1e-8
"""Number added to the variance of an update's advantages, as in verl."""


def group_relative_advantages(
    returns: Tensor, group_ids: Tensor, epsilon: float = 1e-6, *, by_deviation: bool = True
) -> Tensor:
    """Group-relative advantage (TRIAL paper, Eq. 1): Â_i = (R_i − R̄) / (σ_R + ε).

    R̄ and σ_R are the mean and the unbiased deviation of the returns in the rollout's group. A group with returns that are equal
    up to rounding, or with a single rollout, gets exactly 0.

    Args:
        returns: float ``[N]``, R_i, the return of each rollout in units of reward.
        group_ids: integer ``[N]``, from 0, in any order; rollouts with the same id form a group.
        epsilon: ε, above 0.
        by_deviation: if ``False``, there is no division: Â_i = R_i − R̄.

    Returns:
        Float ``[N]`` in the dtype of ``returns``, detached.

    Raises:
        ValueError: wrong shape or dtype, NaN, a negative id, or ``epsilon`` not above 0.
    """
    centred, deviations, scales, _, _ = _group_statistics(returns, group_ids, epsilon)
    return centred / (deviations + epsilon / scales) if by_deviation else centred * scales


def penalised_advantages(
    returns: Tensor,
    group_ids: Tensor,
    penalties: Tensor,
    trajectory_ids: Tensor,
    epsilon: float = 1e-6,
    *,
    by_deviation: bool = True,
    estimator: AdvantageEstimator = "group",
) -> Tensor:
    """Advantage of each turn: the advantage of its rollout, minus the turn's penalty on the scale of advantages.

    R̄ and σ_R are the mean and the unbiased deviation of the returns of a group, n is its number of rollouts.

    ``"group"`` (TRIAL paper, Eq. 1): A_k = (R_i − R̄) / (σ_R + ε) − p_k / max(σ_R + ε, 1). If the returns of a group are
    equal, σ_R cannot scale a penalty, and A_k = −p_k. The bound of 1 prevents larger penalties if returns are nearly equal.

    ``"rloo"`` (arXiv 2402.14740): A_k = (R_i − R̄) n / (n − 1) − p_k, which is R_i minus the mean of the n − 1 other returns.

    ``"max_rl"`` (arXiv 2602.02710): A_k = (R_i − R̄) / R̄ − p_k / max(R̄, 1) for returns that are not negative; a group with R̄ ≤ 0
    has A_k = −p_k.

    For every estimator a group of one rollout, or of equal returns, has no advantage apart from the penalty.

    Args:
        returns: float ``[N]``, R_i in units of reward.
        group_ids: integer ``[N]``, from 0; rollouts with the same id form a group.
        penalties: float ``[K]``, p_k in units of reward.
        trajectory_ids: integer ``[K]`` in ``[0, N)``, the rollout of each turn.
        epsilon: ε, above 0.
        by_deviation: if ``False``, A_k = R_i − R̄ − p_k with ``"group"``; the other estimators never divide by σ_R.
        estimator: one of ``ADVANTAGE_ESTIMATORS``.

    Returns:
        Float ``[K]`` in the dtype of ``returns``, detached.

    Raises:
        ValueError: wrong shape or dtype, NaN, an id out of range, ``epsilon`` not above 0, or an unknown ``estimator``.
    """
    penalties = flat_floats("penalties", penalties).detach().to(returns.dtype)
    turns = flat_ids("trajectory_ids", trajectory_ids, ("penalties", penalties), len(returns))
    if estimator not in ADVANTAGE_ESTIMATORS:
        raise ValueError(f"estimator must be one of {', '.join(ADVANTAGE_ESTIMATORS)}, got {estimator!r}.")
    centred, deviations, scales, means, sizes = _group_statistics(returns, group_ids, epsilon)
    if estimator == "max_rl":
        relative = zero_outside(centred / means, means > 0)
        return relative[turns] - penalties / (means * scales).clamp(min=MIN_PENALTY_UNIT)[turns]
    if estimator == "rloo":
        return (centred * scales * sizes / (sizes - 1).clamp(min=1))[turns] - penalties
    if not by_deviation:
        return (centred * scales)[turns] - penalties
    units = deviations + epsilon / scales
    return (centred / units)[turns] - penalties / (units * scales).clamp(min=MIN_PENALTY_UNIT)[turns]


def _group_statistics(returns: Tensor, group_ids: Tensor, epsilon: float) -> tuple[Tensor, ...]:
    """Return for each rollout (R_i − R̄) / s, σ_R / s, the scale s, R̄ / s and the size of its group.

    The first two are exactly 0 if the group's returns are equal up to rounding. s is the largest power of two that is at most the
    group's largest absolute return, but at least 1. Therefore sums and squares of returns up to 10³⁰⁸ stay finite, and the
    division does not round.
    """
    returns = flat_floats("returns", returns).detach()
    group_ids = flat_ids("group_ids", group_ids, ("returns", returns))
    if not epsilon > 0:
        raise ValueError(f"epsilon must be above 0, got {epsilon}.")
    if not bool(returns.isfinite().all()):
        raise ValueError("returns must be finite.")
    groups, num_groups = renumber(group_ids)
    size = segment_sum(torch.ones_like(returns), groups, num_groups)
    largest = returns.new_zeros(num_groups).scatter_reduce(0, groups, returns.abs(), "amax")
    scales = torch.where(largest > 1, largest / (2 * torch.frexp(largest).mantissa), 1.0)[groups]
    returns = returns / scales
    means = (segment_sum(returns, groups, num_groups) / size)[groups]
    centred = returns - means
    variance = segment_sum(centred.square(), groups, num_groups) / (size - 1).clamp(min=1)
    lowest, highest = (
        returns.new_zeros(num_groups).scatter_reduce(0, groups, returns, reduce, include_self=False)
        for reduce in ("amin", "amax")
    )
    differ = ~equal_up_to_rounding(lowest, highest)
    deviations = zero_outside(variance.sqrt(), differ)
    return zero_outside(centred, differ[groups]), deviations[groups], scales, means, size[groups]


def batch_standardised(advantages: Tensor, counts: Tensor) -> Tensor:
    """REINFORCE++'s advantages (arXiv 2501.03262): (A_k − Ā) / √(σ_A² + ε), with mean and deviation over all tokens of an update.

    Args:
        advantages: float ``[K]``, A of each turn.
        counts: ``[K]``, number of tokens of each turn, of any dtype.

    Returns:
        Float ``[K]``, detached; σ_A is the unbiased deviation over tokens, and ε is ``VARIANCE_EPSILON``.

    Raises:
        ValueError: wrong shape or dtype, NaN, or a negative count.
    """
    advantages = flat_floats("advantages", advantages).detach()
    counts = flat_counts("counts", counts, ("advantages", advantages))
    centred = advantages - (counts * advantages).sum() / counts.sum().clamp(min=1)
    variance = (counts * centred.square()).sum() / (counts.sum() - 1).clamp(min=1)
    return centred / (variance + VARIANCE_EPSILON).sqrt()


def rescaled_advantages(
    advantages: Tensor, gap: Tensor, strength: float, clip: float = 0.2, *, logistic: bool = False
) -> Tensor:
    """RLSD's token advantages: Â = A · [(1 − λ) + λ · clip(exp(sgn(A) · δ), 1 − ε, 1 + ε)].

    If δ, the teacher's log-ratio of a token, has the sign of A, the token's advantage grows in magnitude; if δ has the other sign,
    the advantage shrinks. For λ ≤ 1 the advantage keeps its sign.

    Args:
        advantages: float ``[T]``, A of each token's rollout.
        gap: float ``[T]``, δ = log π_T(y|h⁺) − log π(y|h) in nats, where h is the prompt and h⁺ the prompt with the teacher
            context; this function bounds δ to ±20.
        strength: λ, at least 0.
        clip: ε, in [0, 1].
        logistic: use 2 σ(sgn(A) · δ) instead of exp(sgn(A) · δ), as in StepOPSD.

    Returns:
        Float ``[T]``, detached.

    Raises:
        ValueError: wrong shape or dtype, NaN, or a number out of range.
    """
    advantages = flat_floats("advantages", advantages).detach()
    gap = flat_floats("gap", gap, ("advantages", advantages)).detach()
    if not strength >= 0:
        raise ValueError(f"strength must be at least 0, got {strength}.")
    if not 0 <= clip <= 1:
        raise ValueError(f"clip must be in [0, 1], got {clip}.")
    signed = advantages.sign() * gap.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    factor = (2 * signed.sigmoid() if logistic else signed.exp()).clamp(1 - clip, 1 + clip)
    return advantages * ((1 - strength) + strength * factor)


def discounted_returns(rewards: Tensor, trajectory_ids: Tensor, discount: float) -> Tensor:
    """Discounted return from each turn to the end of its trajectory: G_k = r_k + γ G_{k+1}.

    Args:
        rewards: float ``[K]``, reward of each turn; the turns of a trajectory are in chronological order.
        trajectory_ids: integer ``[K]``, from 0; turns with the same id form a trajectory and need not be adjacent.
        discount: γ, in [0, 1].

    Returns:
        Float ``[K]`` in the dtype of ``rewards``, detached.

    Raises:
        ValueError: wrong shape or dtype, NaN, a negative id, or ``discount`` out of range.
    """
    rewards = flat_floats("rewards", rewards).detach()
    trajectory_ids = flat_ids("trajectory_ids", trajectory_ids, ("rewards", rewards))
    if not 0 <= discount <= 1:
        raise ValueError(f"discount must be in [0, 1], got {discount}.")
    following: dict[int, float] = {}
    returns = rewards.clone()
    for turn in range(len(rewards) - 1, -1, -1):
        trajectory = int(trajectory_ids[turn])
        following[trajectory] = float(rewards[turn]) + discount * following.get(trajectory, 0.0)
        returns[turn] = following[trajectory]
    return returns
