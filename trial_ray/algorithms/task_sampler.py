"""Order in which tasks are trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from trial_ray.errors import CheckpointError, ConfigError
from trial_ray.rollout.episode import derive_seed
from trial_ray.rollout.groups import GroupRequest, GroupSample


class TaskSampler:
    """Shuffled passes over the task list of each environment.

    The state is a seed, a count per environment, and the requests that were put back. With several environments, the next task is
    from the environment that lags most behind its share. Any number of draws therefore contains each environment in proportion to
    its weight, within about one task.

    Args:
        task_ids: the split's tasks of each environment, in fixed order.
        seed: determines the order of every pass and the seeds of every group.
        weights: share of each environment, in any unit, 0 if no tasks are drawn from it; ``None``: equal shares.

    Raises:
        ConfigError: an environment with a share has no tasks.
    """

    def __init__(self, task_ids: Sequence[Sequence[str]], seed: int, weights: Sequence[float] | None = None) -> None:
        weights = weights or [1.0] * len(task_ids)
        if not task_ids:
            raise ConfigError("No environment was chosen; set .environment(...).")
        if not all(listed for listed, weight in zip(task_ids, weights, strict=True) if weight):
            raise ConfigError("The training split has no tasks; choose another split in .environment(env_config=...).")
        self._task_ids = task_ids
        self._seed = seed
        self._shares = [weight / sum(weights) for weight in weights]
        self._drawn = [0] * len(task_ids)
        self._returned: list[GroupRequest] = []

    def draw(self, num_tasks: int, group_size: int) -> list[GroupRequest]:
        """Return requests for the next ``num_tasks`` groups, indexed from 0; requests that were put back come first."""
        again, self._returned = self._returned[:num_tasks], self._returned[num_tasks:]
        requests = [replace(request, index=index, group_size=group_size) for index, request in enumerate(again)]
        for index in range(len(requests), num_tasks):
            total = sum(self._drawn)
            lags = [share * (total + 1) - drawn for share, drawn in zip(self._shares, self._drawn, strict=True)]
            environment = lags.index(max(lags))
            task = self._next_task(environment, requests)
            seed = derive_seed(self._seed, "group", total)
            requests.append(GroupRequest(index, task, group_size, seed, environment))
            self._drawn[environment] += 1
        return requests

    def _next_task(self, environment: int, before: Sequence[GroupRequest]) -> str:
        """Return the next task of an environment, given the requests that the same call has drawn before."""
        task_ids = self._task_ids[environment]
        passes, index_in_pass = divmod(self._drawn[environment], len(task_ids))
        key = (self._seed, passes, environment) if environment else (self._seed, passes)
        return task_ids[int(_order(key, len(task_ids))[index_in_pass])]

    def note(self, sample: GroupSample) -> None:
        """Record the result of a group that enters an update or is dropped."""

    def metrics(self) -> dict[str, float]:
        """Return metrics of the tasks, by their keys in a result."""
        return {}

    def put_back(self, requests: Sequence[GroupRequest]) -> None:
        """Put requests back; they are drawn again, with their tasks and seeds, before all others."""
        self._returned = [*requests, *self._returned]

    def get_state(self, in_flight: Sequence[GroupRequest] = ()) -> dict[str, Any]:
        """Return the number of tasks drawn from each environment, the seed, and the requests that are to be drawn again.

        Args:
            in_flight: requests that were drawn but not trained on; a resumed run draws them first.
        """
        returned = [
            {"task_id": request.task_id, "seed": request.seed, "environment": request.environment}
            for request in (*in_flight, *self._returned)
        ]
        return {"seed": self._seed, "drawn": list(self._drawn), "returned": returned}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from a state of :meth:`get_state`.

        Raises:
            CheckpointError: the state has another number of environments.
        """
        drawn = state["drawn"]
        if not isinstance(drawn, list) or len(drawn) != len(self._task_ids):
            raise CheckpointError(
                f"The checkpoint has the tasks of other environments ({drawn!r}); the config has {len(self._task_ids)}."
            )
        self._seed, self._drawn = state["seed"], list(drawn)
        self._returned = [GroupRequest(index=0, group_size=0, **request) for request in state["returned"]]


@lru_cache(maxsize=8)
def _order(key: tuple[int, ...], number: int) -> np.ndarray:
    """Order of a pass over ``number`` tasks."""
    return np.random.default_rng(key).permutation(number)
