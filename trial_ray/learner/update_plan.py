"""The plan of an update: which turn rows form each optimizer step and microbatch, and which learner computes which.

It follows from the lengths of the trajectories alone, so that every learner makes the same plan before anything is
computed. Rows are numbered in task order, trajectory by trajectory. What a minibatch and a microbatch hold does not depend
on the number of learners; what a learner does is only its share of the work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trial_ray.config.training import MicrobatchWeighting, require_plannable
from trial_ray.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Microbatch:
    """The rows over which token means and the clamp of Eq. 8 are taken.

    Attributes:
        rows: int64 ``[m]``, ascending.
        learner: number of the learner that computes it.
        weight: its share in the minibatch's loss; the weights of a minibatch add up to 1.
    """

    rows: NDArray[np.int64]
    learner: int
    weight: float


Minibatch = tuple[Microbatch, ...]
"""The microbatches of one optimizer step."""


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """Every row is in exactly one scoring share, and in exactly one minibatch of each epoch.

    Attributes:
        scoring: by learner, the rows that it scores before the first step, whole trajectories; int64, ascending.
        steps: the minibatches in the order of the optimizer's steps, all epochs.
    """

    scoring: tuple[NDArray[np.int64], ...]
    steps: tuple[Minibatch, ...]


def plan_update(
    trajectory_tokens: Sequence[Sequence[int]],
    *,
    minibatch_rows: int,
    microbatch_rows: int,
    num_learners: int = 1,
    batch_shards: int = 8,
    num_epochs: int = 1,
    shuffle_seed: Sequence[int] | None = None,
    weighting: MicrobatchWeighting = "rows",
) -> UpdatePlan:
    """Plan an update of all rows.

    The batch in task order is cut into ``batch_shards`` parts, and step k takes the k-th slice of each, as data-parallel
    ranks do that hold a part of the batch each. All cuts are as even as whole rows allow: shards, minibatches and the
    microbatches of a minibatch each differ by one row at most among themselves, so that no step rests on a few left-over
    rows. Within a minibatch rows keep task order and are cut into the fewest microbatches that hold them.

    Args:
        trajectory_tokens: for each trajectory the model inputs of its turns, in tokens; what the work is balanced by.
        minibatch_rows: most rows in an optimizer step.
        microbatch_rows: most rows in a microbatch.
        num_learners: data-parallel learners.
        batch_shards: parts of the batch; 1 takes minibatches one after the other in task order.
        num_epochs: passes over all rows.
        shuffle_seed: seeds a random order of rows, another one for each epoch, in place of shards; ``None``: no shuffling.
        weighting: a microbatch counts by its ``"rows"``, or all of a minibatch ``"equal"``.

    Raises:
        ConfigError: a number below 1, ``minibatch_rows`` below ``microbatch_rows``, or an unknown weighting.
    """
    require_plannable(minibatch_rows, microbatch_rows, batch_shards, weighting)
    for name, value in (("num_learners", num_learners), ("num_epochs", num_epochs)):
        if value < 1:
            raise ConfigError(f"{name} is {value}, expected at least 1.")
    tokens = np.array([length for lengths in trajectory_tokens for length in lengths], np.int64)
    steps: list[Minibatch] = []
    for epoch in range(num_epochs):
        if shuffle_seed is None:
            order = _interleaved(len(tokens), batch_shards)
        else:
            order = np.random.default_rng([*shuffle_seed, epoch]).permutation(len(tokens))
        for rows in _even_cuts(order, minibatch_rows):
            pieces = _even_cuts(np.sort(rows), microbatch_rows)
            learners = _balance([int(tokens[piece].sum()) for piece in pieces], num_learners)
            weights = [1 / len(pieces) if weighting == "equal" else len(piece) / len(rows) for piece in pieces]
            steps.append(tuple(Microbatch(*each) for each in zip(pieces, learners, weights, strict=True)))
    return UpdatePlan(_scoring_shares(trajectory_tokens, num_learners), tuple(steps))


def _interleaved(num_rows: int, num_shards: int) -> NDArray[np.int64]:
    """Rows ordered by how far into its shard each stands: an even cut of them takes the same slice of every shard."""
    rows = np.arange(num_rows)
    bounds = np.arange(num_shards + 1) * num_rows // num_shards
    shards = np.searchsorted(bounds, rows, side="right") - 1
    position = (rows - bounds[shards] + 0.5) / (bounds[shards + 1] - bounds[shards])
    order: NDArray[np.int64] = np.lexsort((shards, position))
    return order


def _even_cuts(rows: NDArray[np.int64], most: int) -> list[NDArray[np.int64]]:
    """Consecutive pieces, as few as hold at most ``most`` rows each, whose sizes differ by one at most."""
    return np.array_split(rows, math.ceil(len(rows) / most)) if len(rows) else []


def _balance(costs: Sequence[int], num_learners: int) -> list[int]:
    """A learner for each piece of work: the largest first, each to the learner with the least so far."""
    load = [0] * num_learners
    learners = [0] * len(costs)
    for piece in sorted(range(len(costs)), key=lambda index: -costs[index]):
        learners[piece] = min(range(num_learners), key=load.__getitem__)
        load[learners[piece]] += costs[piece]
    return learners


def _scoring_shares(trajectory_tokens: Sequence[Sequence[int]], num_learners: int) -> tuple[NDArray[np.int64], ...]:
    """Consecutive trajectories by learner, so that rollouts with a common beginning stay together; balanced by tokens."""
    costs = np.array([sum(lengths) for lengths in trajectory_tokens], np.int64)
    middles = np.cumsum(costs) - costs / 2
    owners = np.minimum(middles * num_learners // max(1, costs.sum()), num_learners - 1).astype(np.int64)
    row_owners = np.repeat(owners, [len(lengths) for lengths in trajectory_tokens])
    return tuple(np.flatnonzero(row_owners == learner) for learner in range(num_learners))
