"""Agreement of the dense loss with outcomes: the share of it that raises the turns of rollouts with higher returns."""

from __future__ import annotations

import torch
from torch import Tensor

from trial_ray.objectives.advantages import group_means
from trial_ray.objectives.rounding import equal_up_to_rounding
from trial_ray.objectives.segments import flat_floats, flat_ids, renumber, segment_sum


def agreeing_parts(coefficients: Tensor, returns: Tensor, group_ids: Tensor, positions: Tensor) -> Tensor:
    """For each group, the amount of its dense loss that has the sign of its rollouts' returns, and the whole amount.

    A turn's return is compared with the mean of the group's turns at the same position, because successful rollouts end early, so
    late turns are from rollouts that fail. To first order, the loss then changes the expected return by the agreeing part minus
    the rest.

    Args:
        coefficients: float ``[K]``, c_k of each turn, positive if its log-probability is raised; 0 excludes a turn.
        returns: float ``[K]``, R_k of each turn's rollout, in units of reward.
        group_ids: integer ``[K]``, from 0; the same for the rollouts of one task.
        positions: integer ``[K]``, from 0, of each turn in its rollout.

    Returns:
        Float64 ``[G, 2]``, a row for each group with different returns: Σ_k max(c_k (R_k − R̄), 0) and Σ_k |c_k (R_k − R̄)|.

    Raises:
        ValueError: wrong shape or dtype, NaN, or a negative id.
    """
    coefficients = flat_floats("coefficients", coefficients).double()
    returns = flat_floats("returns", returns, ("coefficients", coefficients)).double()
    groups = flat_ids("group_ids", group_ids, ("coefficients", coefficients))
    positions = flat_ids("positions", positions, ("coefficients", coefficients))
    groups, number = renumber(groups)
    means = group_means(returns, positions * number + groups)
    products = torch.where(equal_up_to_rounding(returns, means), 0.0, coefficients * (returns - means))
    parts = torch.stack([segment_sum(each, groups, number) for each in (products.clamp(min=0), products.abs())], 1)
    return parts[parts[:, 1] > 0]


def ratio_of_sums(parts: Tensor) -> tuple[Tensor, Tensor] | None:
    """Ratio of two sums over groups, A = Σ_g a_g / Σ_g b_g for rows (a_g, b_g), and its standard error.

    Of the rows of :func:`agreeing_parts` it is the share of the dense loss that agrees with the returns: 0.5 if the loss is
    unrelated to them, and smaller if it opposes them. The standard error over G groups is
    √(G / (G − 1) · Σ_g (a_g − A b_g)²) / Σ_g b_g. Not in the paper.

    Args:
        parts: float64 ``[G, 2]`` with positive b_g.

    Returns:
        Both of shape (); ``None`` if there are fewer than two groups.
    """
    groups = len(parts)
    if groups < 2:
        return None
    above, below = parts.unbind(1)
    ratio = above.sum() / below.sum()
    spread = ((above - ratio * below) ** 2).sum()
    return ratio, (groups / (groups - 1) * spread).sqrt() / below.sum()
