"""Env runners that one trial of a sweep leaves to the next: to start new ones takes longer than a short trial."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray.rllib.algorithms import algorithm
from ray.rllib.env.env_runner_group import EnvRunnerGroup


@contextmanager
def runners_kept(group: EnvRunnerGroup | None) -> Iterator[None]:
    """Let RLlib's set-up of an algorithm take this group of env runners in place of making one; ``None``: it makes one."""
    made = algorithm.EnvRunnerGroup

    def take(**arguments: Any) -> EnvRunnerGroup:
        assert group is not None
        group._worker_manager._num_actor_restarts = group._num_env_runners_dropped_lifetime = 0
        return group

    if group is not None:
        algorithm.EnvRunnerGroup = take  # the only place where RLlib says which
    try:
        yield
    finally:
        algorithm.EnvRunnerGroup = made
