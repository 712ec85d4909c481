"""Plan of an update: the turn rows of each optimizer step and microbatch, and the learner that computes each microbatch.

The plan depends only on the lengths of the rows and the config, so every learner makes the same plan before anything is
computed. Rows are numbered in task order: group by group and, within a group, trajectory by trajectory. The rows of a minibatch
and of a microbatch do not depend on the number of learners; a learner only computes its share of the work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from trial_ray.adapters.templates import CONVERSATIONS
from trial_ray.config.run import RunSettings
from trial_ray.models.prefix_tree import Ints

MAX_IMBALANCE = 1.15
"""Maximum number of tokens that one learner trains in a minibatch, as a multiple of the maximum in the most even assignment.
Within this limit, learners mostly train the rows that they score."""


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Turns over which the loss is averaged and the dense loss is clamped (TRIAL paper, Eq. 8).

    Attributes:
        rows: row numbers, int64 ``[m]``, ascending.
        learner: index of the learner that computes the microbatch.
        weight: share in the minibatch's loss; the weights of a minibatch add up to 1, or are all 0 if no row has a token to
            learn from.
    """

    rows: Ints
    learner: int
    weight: float


Minibatch = tuple[Microbatch, ...]
"""The microbatches of one optimizer step."""


@dataclass(frozen=True)
class UpdatePlan:
    """Rows that each learner scores, and minibatches. A row is scored by one learner, and is in one minibatch of each epoch.

    Attributes:
        scoring: for each learner, the rows that it scores before the first step, whole trajectories; int64, ascending.
        steps: the minibatches in the order of the optimizer's steps, all epochs.
    """

    scoring: tuple[Ints, ...]
    steps: tuple[Minibatch, ...]

    def weighted_by(self, weights: NDArray[np.int64]) -> UpdatePlan:
        """Return the plan with microbatches weighted by the sums of their rows' weights.

        The loss of a microbatch is a mean over its rows with a token to learn from, or over these tokens. If rows without such
        a token counted in the weight, they would scale the gradients of the other rows.

        Args:
            weights: int64 ``[K]``, at least 0; 0 for a row without a token to learn from.
        """
        return replace(self, steps=tuple(_weighted(minibatch, weights) for minibatch in self.steps))


def plan_update(trajectory_tokens: Sequence[Sequence[int]], config: RunSettings, iteration: int) -> UpdatePlan:
    """Plan an update of all rows.

    The rows, in task order (group by group), are cut into ``batch_shards`` shards, and step k takes the k-th slice of each shard,
    as if each shard were the batch of one data-parallel rank; with one shard, a minibatch is a slice of all rows. With ``shuffle``,
    rows are instead in a random order, different in each epoch. All cuts are as even as whole rows allow: the sizes of shards, of
    minibatches and of the microbatches of a minibatch differ by at most one row, so no step consists of a few left-over rows.
    Within a minibatch, rows keep task order and are cut into the fewest possible microbatches.

    If the turns of a trajectory are one conversation, shards, minibatches and the random order consist of trajectories instead of
    rows, so that the common tokens of these turns are computed in one optimizer step. The sizes of shards and minibatches then
    differ by about one trajectory, and a trajectory of more than ``minibatch_rows`` turns has a step of its own.

    The weight of a microbatch is its share of the rows; :meth:`UpdatePlan.weighted_by` replaces it, except with
    ``microbatch_weighting="equal"``, where the microbatches of a minibatch have equal weights.

    Args:
        trajectory_tokens: for each trajectory, the numbers of tokens of its turns (prompt and response), which measure the work.
        config: config of the run.
        iteration: counted from 1.
    """
    sizes = np.array([len(lengths) for lengths in trajectory_tokens], np.int64)
    tokens = np.array([length for lengths in trajectory_tokens for length in lengths], np.int64)
    num_learners = max(1, config.num_learners)
    owners = _even_shares(trajectory_tokens, num_learners)
    whole_trajectories = config.prompt_style in CONVERSATIONS
    num_units, max_rows = len(sizes) if whole_trajectories else len(tokens), config.minibatch_rows
    steps: list[Minibatch] = []
    for epoch in range(config.num_epochs):
        if config.shuffle:
            order = np.random.default_rng([config.seed or 0, iteration, epoch]).permutation(num_units)
        else:
            order = _interleaved(num_units, config.batch_shards)
        for rows in _whole_cuts(order, sizes, max_rows) if whole_trajectories else _even_cuts(order, max_rows):
            pieces = _even_cuts(np.sort(rows), config.microbatch_rows)
            learners = _assign_to_learners(pieces, tokens, owners, num_learners)
            equal = config.microbatch_weighting == "equal"
            weights = [1 / len(pieces) if equal else len(piece) / len(rows) for piece in pieces]
            steps.append(tuple(map(Microbatch, pieces, learners, weights)))
    scoring = tuple(np.flatnonzero(owners == learner) for learner in range(num_learners))
    return UpdatePlan(scoring, tuple(steps))


def _weighted(minibatch: Minibatch, weights: NDArray[np.int64]) -> Minibatch:
    counts = [int(weights[microbatch.rows].sum()) for microbatch in minibatch]
    return tuple(
        replace(microbatch, weight=count / max(1, sum(counts)))
        for microbatch, count in zip(minibatch, counts, strict=True)
    )


def _interleaved(num_units: int, num_shards: int) -> Ints:
    """Return rows or trajectories ordered by their position in their shard, so an even cut takes the same slice of every shard."""
    rows = np.arange(num_units)
    bounds = np.arange(num_shards + 1) * num_units // num_shards
    shards = np.searchsorted(bounds, rows, side="right") - 1
    position = (rows - bounds[shards] + 0.5) / (bounds[shards + 1] - bounds[shards])
    return np.lexsort((shards, position))


def _even_cuts(rows: Ints, max_rows: int) -> list[Ints]:
    """Cut rows into the fewest consecutive pieces of at most ``max_rows`` rows each, with sizes that differ by at most one."""
    return np.array_split(rows, math.ceil(len(rows) / max_rows)) if len(rows) else []


def _whole_cuts(order: Ints, sizes: Ints, max_rows: int) -> list[Ints]:
    """Cut trajectories into the fewest consecutive pieces, about even, of at most ``max_rows`` rows or of one longer trajectory.

    Args:
        order: int64 ``[T]``, numbers of the trajectories.
        sizes: int64 ``[T]``, rows of each trajectory.
        max_rows: maximum number of rows.

    Returns:
        The rows of each piece.
    """
    if not len(order):
        return []
    rows = np.split(np.arange(sizes.sum()), np.cumsum(sizes)[:-1])
    # Limit the size of a longer trajectory to max_rows, so that the trajectory fills one piece.
    limited = np.minimum(sizes[order], max_rows)
    ends = np.concatenate([[0], np.cumsum(limited)])
    count = math.ceil(ends[-1] / max_rows)
    while (capacity := _min_capacity(ends, int(limited.max()), count)) > max_rows:
        count += 1
    cuts = _near_cuts(ends, capacity, np.searchsorted(ends[1:] - limited / 2, np.arange(count) * ends[-1] / count))
    return [np.concatenate([rows[number] for number in piece]) for piece in np.split(order, cuts[1:])]


def _assign_to_learners(pieces: Sequence[Ints], tokens: Ints, owners: Ints, num_learners: int) -> list[int]:
    """Return the learner that computes each microbatch: the learner that scores the row in the middle of the microbatch.

    Learners therefore mostly train the rows that they score. If a learner would exceed the limit of :data:`MAX_IMBALANCE`, other
    learners compute some of its microbatches. The learners of consecutive microbatches are in ascending order.

    Args:
        pieces: rows of each microbatch of a minibatch.
        tokens: int64 ``[K]``, tokens of all rows.
        owners: int64 ``[K]``, the learner that scores each row, ascending.
        num_learners: number of data-parallel learners.
    """
    costs = [int(tokens[piece].sum()) for piece in pieces]
    ends = np.concatenate([[0], np.cumsum(costs)])
    capacity = int(MAX_IMBALANCE * _min_capacity(ends, max(costs), num_learners))
    preferred = np.searchsorted([owners[piece[len(piece) // 2]] for piece in pieces], np.arange(num_learners))
    cuts = _near_cuts(ends, capacity, preferred)
    return (np.searchsorted(cuts, np.arange(len(costs)), side="right") - 1).tolist()


def _near_cuts(ends: Ints, capacity: int, preferred: Ints) -> list[int]:
    """Divide items into consecutive parts, and return the index of each part's first item.

    Args:
        ends: cumulative sizes of the items, in tokens or rows, preceded by 0.
        capacity: maximum size of a part.
        preferred: preferred index of each part's first item; an index is moved if a part would exceed the capacity.
    """
    # Find, from the last part backwards, the earliest start from which this part and all later parts stay within the capacity.
    earliest = [len(ends) - 1]
    for _ in preferred[1:]:
        earliest.append(int(np.searchsorted(ends, ends[earliest[-1]] - capacity)))
    cuts = [0]
    for part in range(1, len(preferred)):
        cuts.append(min(max(int(preferred[part]), earliest[-part]), _fill(ends, cuts[-1], capacity)))
    return cuts


def _min_capacity(ends: Ints, largest: int, num_parts: int) -> int:
    """Return the smallest capacity (maximum size of a part) with which ``num_parts`` parts can contain all items, by bisection.

    Args:
        ends: as in :func:`_near_cuts`.
        largest: size of the largest item.
        num_parts: number of parts.
    """
    lower, upper = max(largest, math.ceil(ends[-1] / num_parts)), int(ends[-1])
    while lower < upper:
        capacity, cut = (lower + upper) // 2, 0
        for _ in range(num_parts):
            cut = _fill(ends, cut, capacity)
        if cut == len(ends) - 1:
            upper = capacity
        else:
            lower = capacity + 1
    return upper


def _fill(ends: Ints, cut: int, capacity: int) -> int:
    """Return the largest possible end (exclusive) of a part that starts with item ``cut``; arguments as in :func:`_near_cuts`."""
    return int(np.searchsorted(ends, ends[cut] + capacity, side="right")) - 1


def _even_shares(trajectory_tokens: Sequence[Sequence[int]], num_learners: int) -> Ints:
    """Return, for each row, the index of the learner that scores it.

    Each learner gets consecutive whole trajectories with about the same number of tokens, so that groups mostly stay together.
    """
    costs = np.array([sum(lengths) for lengths in trajectory_tokens], np.int64)
    middles = np.cumsum(costs) - costs / 2
    owners = np.minimum(middles * num_learners // max(1, costs.sum()), num_learners - 1).astype(np.int64)
    return np.repeat(owners, [len(lengths) for lengths in trajectory_tokens])
