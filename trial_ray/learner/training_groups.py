"""Trajectory groups on their way to the learners: every learner gets all of them, by reference."""

from __future__ import annotations

import logging
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, ObjectLostError
from ray.rllib.core.learner.training_data import TrainingData

from trial_ray.errors import InfrastructureError
from trial_ray.learner.exchange import LearnerExchange
from trial_ray.rollout.trajectory import TrajectoryGroup

logger = logging.getLogger(__name__)

FETCH_TIMEOUT_S = 600.0


class TrainingGroups(TrainingData):
    """References to groups, in ``episodes_refs``, each to a list that holds one.

    RLlib would deal the references out to the learners. Here the plan of the update deals out rows, for which every
    learner makes the same plan from the lengths of all; learners on one node share the object store's copy.
    """

    def shard(self, num_shards: int, *args: Any, **kwargs: Any) -> list[tuple[TrainingGroups, dict[str, Any]]]:
        """The same references for each learner."""
        return [(self, {}) for _ in range(num_shards)]

    def solve_refs(self) -> None:
        """Nothing yet: learners must agree on what is lost, see :func:`fetch_groups`."""


def fetch_groups(data: TrainingGroups, exchange: LearnerExchange) -> tuple[list[TrajectoryGroup], int]:
    """The groups that every learner could get, in order, and the number of groups that were lost.

    A group is lost when the env runner that sampled it has died since. One that any learner misses is left out by all.

    Raises:
        InfrastructureError: a group did not arrive in time.
    """
    groups = [_fetch(ref) for ref in data.episodes_refs]
    missing = set().union(*exchange.gather({index for index, group in enumerate(groups) if group is None}))
    if missing:
        logger.warning("%d of %d groups were lost with the env runner that sampled them", len(missing), len(groups))
    return [group for index, group in enumerate(groups) if index not in missing], len(missing)


def _fetch(ref: ray.ObjectRef) -> TrajectoryGroup | None:
    try:
        return ray.get(ref, timeout=FETCH_TIMEOUT_S)[0]
    except GetTimeoutError as error:
        raise InfrastructureError(
            f"A group of rollouts did not reach a learner within {FETCH_TIMEOUT_S:.0f} s."
        ) from error
    except ObjectLostError as error:
        logger.warning("a group of rollouts is lost: %s", error)
        return None
