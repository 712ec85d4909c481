"""Agreement of hindsight with outcomes: whether a group's hindsight log-ratios order its rollouts as their returns do."""

from __future__ import annotations

import torch
from torch import Tensor

from trial_ray.objectives.rounding import equal_up_to_rounding
from trial_ray.objectives.segments import flat_floats, flat_ids


def ordered_pairs(scores: Tensor, returns: Tensor, group_ids: Tensor) -> Tensor:
    """Pairs of rollouts of one group whose returns differ by more than rounding, and how many of them the scores order alike.

    Args:
        scores: float ``[N]``, of each rollout; NaN where it has none, whose pairs do not count.
        returns: float ``[N]``, R_i in units of reward.
        group_ids: integer ``[N]``, from 0; rollouts with the same id form a group.

    Returns:
        Float64 ``[G, 2]``, a row for each group with pairs: c_g, the pairs whose better rollout has the higher score (equal
        scores count half), and n_g, all its pairs.

    Raises:
        ValueError: wrong shape or dtype, NaN among the returns, or a negative id.
    """
    returns = flat_floats("returns", returns).double()
    groups = flat_ids("group_ids", group_ids, ("returns", returns))
    flat_floats("scores", scores.nan_to_num(), ("returns", returns))
    found = []
    for group in groups.unique():
        inside = (groups == group) & ~scores.isnan()
        score, earned = scores[inside].double(), returns[inside]
        better = (earned[:, None] > earned) & ~equal_up_to_rounding(earned[:, None], earned)
        higher = (score[:, None] > score).double() + 0.5 * (score[:, None] == score)
        if better.any():
            found.append(torch.stack([higher[better].sum(), better.sum().double()]))
    return torch.stack(found) if found else torch.empty(0, 2, dtype=torch.float64)


def agreement(pairs: Tensor) -> tuple[Tensor, Tensor] | None:
    """Area under the ROC curve of scores as a judge of which rollout of a group returned more, and its standard error.

    A = Σ_g c_g / Σ_g n_g: the probability that the better of two rollouts has the higher score; 0.5 where scores say nothing of
    the returns. The standard error is that of a ratio of sums over G groups, √(G / (G − 1) · Σ_g (c_g − A n_g)²) / Σ_g n_g.
    Not in the paper.

    Args:
        pairs: float64 ``[G, 2]`` of :func:`ordered_pairs`.

    Returns:
        Both of shape (); ``None`` of fewer than two groups.
    """
    groups = len(pairs)
    if groups < 2:
        return None
    won, number = pairs.unbind(1)
    mean = won.sum() / number.sum()
    spread = ((won - mean * number) ** 2).sum()
    return mean, (groups / (groups - 1) * spread).sqrt() / number.sum()
