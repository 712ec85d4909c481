"""Draws task instances for training: every task once per pass, in an order that the seed fixes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trial_ray.errors import ConfigError
from trial_ray.rollout.episode import derive_seed
from trial_ray.rollout.requests import GroupRequest


class TaskSampler:
    """Shuffled passes over a task list; its state is two integers.

    Args:
        task_ids: the split's tasks, in the environment's fixed order.
        seed: fixes the order of every pass and the seeds of every group.

    Raises:
        ConfigError: the list is empty.
    """

    def __init__(self, task_ids: Sequence[str], seed: int) -> None:
        if not task_ids:
            raise ConfigError("The training split has no tasks; choose another split in .environment(env_config=...).")
        self._task_ids = task_ids
        self._seed = seed
        self._drawn = 0

    def draw(self, num_tasks: int, group_size: int) -> list[GroupRequest]:
        """Requests for the next ``num_tasks`` groups, indexed from 0."""
        requests = []
        for index in range(num_tasks):
            passes, place = divmod(self._drawn, len(self._task_ids))
            task = self._task_ids[int(self._order(passes)[place])]
            requests.append(GroupRequest(index, task, group_size, derive_seed(self._seed, "group", self._drawn)))
            self._drawn += 1
        return requests

    def get_state(self) -> dict[str, Any]:
        """Tasks drawn so far, and the seed they were drawn with."""
        return {"seed": self._seed, "drawn": self._drawn}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`get_state` was taken."""
        self._seed, self._drawn = state["seed"], state["drawn"]

    def _order(self, passes: int) -> np.ndarray:
        return np.random.default_rng([self._seed, passes]).permutation(len(self._task_ids))
