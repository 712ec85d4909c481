"""Env runners that are requested from Ray during a run, and join it when a node has room for them."""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.rllib.env.env_runner_group import EnvRunnerGroup

from trial_ray.errors import first_line
from trial_ray.ray_internals import add_env_runner, start_env_runner

if TYPE_CHECKING:
    from trial_ray.rollout.env_runner import TextEnvRunner

logger = logging.getLogger(__name__)

PING_TIMEOUT_S = 120.0
"""Deadline in seconds for the answer of an env runner that has started."""


class NewRunners:
    """Env runners that were requested from Ray and have not joined yet.

    Args:
        runners: the group that they join.
    """

    def __init__(self, runners: EnvRunnerGroup) -> None:
        self._runners = runners
        self._pings: dict[ObjectRef[str], ActorHandle[TextEnvRunner]] = {}
        # A number is never used twice, because it is part of the names of recordings.
        self._numbers = itertools.count(1 + runners.num_remote_env_runners())

    def request(self, count: int) -> None:
        """Request further env runners from Ray, without waiting for them."""
        for _ in range(count):
            handle: ActorHandle[TextEnvRunner] = start_env_runner(self._runners, next(self._numbers))
            self._pings[handle.ping.remote()] = handle

    def add_started(self) -> list[int]:
        """Add the env runners that have started to the group, request the failed ones again, and return the ids of the new ones."""
        ready, _ = ray.wait([*self._pings], num_returns=len(self._pings), timeout=0) if self._pings else ([], [])
        added = []
        for ping in ready:
            handle = self._pings.pop(ping)
            try:
                ray.get(ping, timeout=PING_TIMEOUT_S)
            except RayError as error:
                logger.warning("an env runner did not start and is requested again: %s", first_line(error))
                self.request(1)
            else:
                added.append(add_env_runner(self._runners, handle))
        return added

    def withdraw(self) -> None:
        """Cancel the requests: end the env runners that have not started."""
        for handle in self._pings.values():
            ray.kill(handle)
        self._pings = {}
