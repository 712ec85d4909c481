"""The update on all learners, which ends as soon as one of them fails: the others may wait for it in a sum."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.rllib.core.learner.learner_group import LearnerGroup

from trial_ray.errors import LearnerError
from trial_ray.learner.exchange import TrainingGroups

FAILED_TOGETHER_S = 5.0
"""How long to wait, once a learner failed, for what the others say: the cause may be the death of one of them."""
_LOOK_S = 60.0


def update_learners(learners: LearnerGroup, data: TrainingGroups, timesteps: dict[str, Any]) -> list[dict[str, Any]]:
    """Train every learner on the groups; returns the metrics of each.

    It ends with the learners, however long they compute; the watch over the run's progress kills those that hang.

    Raises:
        LearnerError: a learner died.
        RayTaskError: a learner raised; it is of the class of what was raised, too.
    """
    if learners.is_local:
        return list(learners.update(training_data=data, timesteps=timesteps))
    # Not through RLlib's update, which waits for all learners when one has failed.
    calls = [worker.update.remote(training_data=data, timesteps=timesteps) for worker in learners._workers]
    pending, results = list(calls), {}
    while pending:
        ready, pending = ray.wait(pending, num_returns=1, timeout=_LOOK_S)
        for call in ready:
            try:
                results[call] = ray.get(call)
            except RayError as error:
                raise _cause(calls, error, timesteps) from error
    return [results[call] for call in calls]


def _cause(calls: list[Any], error: RayError, timesteps: dict[str, Any]) -> Exception:
    """The death of a learner, where there was one, else what was raised first."""
    ready, _ = ray.wait(calls, num_returns=len(calls), timeout=FAILED_TOGETHER_S)
    dead = []
    for call in ready:
        try:
            ray.get(call)
        except RayActorError:
            dead.append(f"learner {calls.index(call)}")
        except RayError:
            continue
    if not dead:
        return error
    return LearnerError(f"{' and '.join(dead)} died in the update of iteration {timesteps['training_iteration']}")
