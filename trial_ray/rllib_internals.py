"""Uses of private parts of RLlib, tested against the pinned version; docstrings explain why no public API is enough."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

from ray.actor import ActorHandle
from ray.rllib.algorithms import Algorithm, algorithm
from ray.rllib.core.learner.learner_group import LearnerGroup
from ray.rllib.env.env_runner_group import EnvRunnerGroup


class RestartableGroup(EnvRunnerGroup):
    """Group whose env runners Ray can restart even after the group was deleted, because each env runner has a copy of the config.

    RLlib passes a reference to the config instead, which is invalid after the group is deleted; Ray warns about such
    references. A copy takes about 20 kB. RLlib also has no setting for Ray's concurrency groups of an env runner.

    Attributes:
        concurrency_groups: maximum number of concurrent calls by the name of the concurrency group.
    """

    concurrency_groups: ClassVar[dict[str, int]] = {}

    def _make_worker(self, *, worker_index: int, config: Any, **arguments: Any) -> Any:
        self._remote_args["concurrency_groups"] = self.concurrency_groups
        config = self._remote_config if worker_index else config
        return super()._make_worker(worker_index=worker_index, config=config, **arguments)


def env_runner_actors(runners: EnvRunnerGroup | None) -> dict[int, ActorHandle[Any]]:
    """Return the remote env runners by index. RLlib's own calls end an env runner that raises an error, and lose the error."""
    return {} if runners is None else dict(runners._worker_manager.actors())


def mark_lost(runners: EnvRunnerGroup, index: int) -> None:
    """Exclude an env runner from work until Ray has restarted it. RLlib only marks env runners that fail in its own calls."""
    runners._worker_manager.set_actor_state(index, healthy=False)


def start_env_runner(runners: EnvRunnerGroup, index: int) -> ActorHandle[Any]:
    """Request one more env runner from Ray, without waiting for it; :func:`add_env_runner` adds it to the group.

    RLlib's ``add_workers`` counts a new env runner as ready from the start, possibly long before a node has room for it.
    """
    return runners._make_worker(
        env_creator=runners._env_creator,
        validate_env=None,
        worker_index=index,
        num_workers=index,
        config=runners._remote_config_obj_ref,
    )


def add_env_runner(runners: EnvRunnerGroup, handle: ActorHandle[Any]) -> int:
    """Add a started env runner to the group, and return its index. RLlib can only add env runners that it starts itself."""
    runners._worker_manager.add_actors([handle])
    return int(max(runners._worker_manager.actor_ids()))


def count_dropped(runners: EnvRunnerGroup) -> None:
    """Add one env runner that did not answer in time to RLlib's metric of dropped env runners.

    RLlib itself only counts env runners that its own calls drop.
    """
    runners._num_env_runners_dropped_lifetime += 1


def learner_actors(learners: LearnerGroup | None) -> list[Any]:
    """Return the remote learners by rank, to call them directly; RLlib's update waits for all learners, even failed ones."""
    return [] if learners is None or learners.is_local else list(learners._workers)


def trial_folder(algorithm: Algorithm) -> Path | None:
    """Return the folder of an algorithm's Tune trial; ``None`` outside Tune. Tune has such an API for function trainables only."""
    return None if algorithm._storage is None else Path(algorithm._storage.trial_fs_path)


@contextmanager
def env_runners_of(
    kept: EnvRunnerGroup | None, number: int, make: Callable[..., EnvRunnerGroup] = EnvRunnerGroup
) -> Iterator[None]:
    """Make RLlib's ``Algorithm.setup`` use the env runners ``kept`` from an earlier Tune trial, or create a group of env runners.

    The group is created by ``make`` with ``number`` env runners; RLlib would create its own group, with the number of env runners
    in the config. Env runners are kept because starting new ones can take longer than a short trial. The context also prevents
    RLlib from calling ``on_algorithm_init``, because RLlib would call it before the inference engines exist.
    """

    def keep_or_make(**arguments: Any) -> EnvRunnerGroup:
        if kept is None:
            return make(**arguments, num_env_runners=number)
        kept._worker_manager._num_actor_restarts = kept._num_env_runners_dropped_lifetime = 0
        return kept

    with patch.multiple(algorithm, EnvRunnerGroup=keep_or_make, make_callback=lambda hook, *args, **kwargs: None):
        yield
