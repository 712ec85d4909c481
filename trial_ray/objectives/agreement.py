"""Agreement of hindsight with outcomes: whether a group's hindsight log-ratios order its rollouts as their returns do."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trial_ray.objectives.rounding import equal_up_to_rounding
from trial_ray.objectives.segments import flat_floats, flat_ids


class Agreement(NamedTuple):
    """How often the better of two rollouts has the higher score.

    Attributes:
        mean: share of the pairs, shape (); 0.5 where scores say nothing of the returns, below it where they say the contrary.
        error: its standard error over groups, shape (); infinite of a single group with pairs.
        pairs: pairs of one group with different returns.
    """

    mean: Tensor
    error: Tensor
    pairs: int


def group_agreement(scores: Tensor, returns: Tensor, group_ids: Tensor) -> Agreement | None:
    """Area under the ROC curve of ``scores`` as a judge of which rollout of a group returned more, averaged by pairs.

    A = Σ_g c_g / Σ_g n_g over groups g with n_g pairs of rollouts whose returns differ by more than rounding; c_g counts those in
    which the better rollout has the higher score, equal scores by half. The standard error is that of a ratio of sums over G
    groups, √(G / (G − 1) · Σ_g (c_g − A n_g)²) / Σ_g n_g. Not in the paper.

    Args:
        scores: float ``[N]``, of each rollout; NaN where it has none, whose pairs do not count.
        returns: float ``[N]``, R_i in units of reward.
        group_ids: integer ``[N]``, from 0; rollouts with the same id form a group.

    Returns:
        ``None`` without any pair.

    Raises:
        ValueError: wrong shape or dtype, NaN among the returns, or a negative id.
    """
    returns = flat_floats("returns", returns).double()
    groups = flat_ids("group_ids", group_ids, ("returns", returns))
    flat_floats("scores", scores.nan_to_num(), ("returns", returns))
    scores = scores.double()
    counts, wins = [], []
    for group in groups.unique():
        inside = (groups == group) & ~scores.isnan()
        score, earned = scores[inside], returns[inside]
        better = (earned[:, None] > earned) & ~equal_up_to_rounding(earned[:, None], earned)
        if better.any():
            higher = (score[:, None] > score).double() + 0.5 * (score[:, None] == score)
            counts.append(better.sum())
            wins.append(higher[better].sum())
    if not counts:
        return None
    number, won = torch.stack(counts).double(), torch.stack(wins)
    mean, pairs = won.sum() / number.sum(), number.sum()
    spread = ((won - mean * number) ** 2).sum()
    error = (len(counts) / (len(counts) - 1) * spread).sqrt() / pairs if len(counts) > 1 else torch.tensor(torch.inf)
    return Agreement(mean, error, int(pairs))
