"""Agreement of hindsight with outcomes: whether hindsight log-ratios order the turns of a group as their rollouts' returns do."""

from __future__ import annotations

import torch
from torch import Tensor

from trial_ray.objectives.rounding import equal_up_to_rounding
from trial_ray.objectives.segments import flat_floats, flat_ids


def ordered_pairs(scores: Tensor, returns: Tensor, group_ids: Tensor, positions: Tensor) -> Tensor:
    """Pairs of turns of one group and position whose returns differ by more than rounding, and how many the scores order alike.

    Turns are compared at the same position, since rollouts that win end early: those that fail have more late turns.

    Args:
        scores: float ``[K]``, of each turn; NaN where it has none, whose pairs do not count.
        returns: float ``[K]``, of each turn's rollout, in units of reward.
        group_ids: integer ``[K]``, from 0; rollouts of one task.
        positions: integer ``[K]``, from 0, of each turn in its rollout.

    Returns:
        Float64 ``[G, 2]``, a row for each group with pairs: c_g, the pairs whose better rollout has the higher score (equal
        scores count half), and n_g, all its pairs.

    Raises:
        ValueError: wrong shape or dtype, NaN among the returns, or a negative id.
    """
    returns = flat_floats("returns", returns).double()
    flat_floats("scores", scores.nan_to_num(), ("returns", returns))
    groups = flat_ids("group_ids", group_ids, ("returns", returns))
    positions = flat_ids("positions", positions, ("returns", returns))
    found: dict[int, Tensor] = {}
    for group, position in torch.stack([groups, positions]).unique(dim=1).T.tolist():
        inside = (groups == group) & (positions == position) & ~scores.isnan()
        score, earned = scores[inside].double(), returns[inside]
        better = (earned[:, None] > earned) & ~equal_up_to_rounding(earned[:, None], earned)
        higher = (score[:, None] > score).double() + 0.5 * (score[:, None] == score)
        if better.any():
            found[group] = found.get(group, 0) + torch.stack([higher[better].sum(), better.sum().double()])
    return torch.stack(list(found.values())) if found else torch.empty(0, 2, dtype=torch.float64)


def agreement(pairs: Tensor) -> tuple[Tensor, Tensor] | None:
    """Area under the ROC curve of the scores as a judge of which turn's rollout returned more, and its standard error.

    A = Σ_g c_g / Σ_g n_g: the probability that of two turns the better rollout's has the higher score; 0.5 where scores say
    nothing of the returns. The standard error is that of a ratio of sums over G groups, √(G / (G − 1) · Σ_g (c_g − A n_g)²) /
    Σ_g n_g. Not in the paper.

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
