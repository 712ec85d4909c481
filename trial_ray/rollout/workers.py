"""Env runners and engines taken together: what plays groups for training and single episodes for evaluation."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError
from ray.rllib.env.env_runner_group import EnvRunnerGroup

from trial_ray.errors import InfrastructureError
from trial_ray.inference.pool import EnginePool
from trial_ray.rollout.requests import GroupRequest, GroupSample, SampleSettings

if TYPE_CHECKING:
    from trial_ray.algorithms.grpo_config import GRPOConfig

logger = logging.getLogger(__name__)

Batch = tuple[list[GroupSample], dict[str, Any]]
"""What one env runner sampled, and its metrics."""


def create_engines(config: GRPOConfig, placement_group_bundle_offset: int | None = None) -> EnginePool:
    """Create the engines that ``config`` describes, without waiting for them; errors as ``EnginePool.create``."""
    limit = config.max_prompt_tokens + config.max_response_tokens
    return EnginePool.create(
        engine=config.engine,
        model_path=str(config.model_path),
        num_engines=config.num_engines,
        engine_kwargs={"max_model_len": limit, **config.engine_kwargs, "dtype": config.engine_dtype()},
        num_cpus_per_engine=config.num_cpus_per_engine,
        num_gpus_per_engine=config.num_gpus_per_engine,
        placement_group_bundle_offset=placement_group_bundle_offset,
    )


class RolloutWorkers:
    """The env runners of a run, connected to its engines.

    Args:
        config: limits and deadlines.
        runners: remote env runners, or a single local one where the config asks for none.
        engines: started engines.
    """

    def __init__(self, config: GRPOConfig, runners: EnvRunnerGroup, engines: EnginePool) -> None:
        self._config = config
        self._runners = runners
        self._engines = engines
        self._connect()

    def sample_groups(self, requests: Sequence[GroupRequest], settings: SampleSettings) -> list[Batch]:
        """Hand the requests out to the env runners, whole groups each; what a lost runner had is missing."""
        runner_ids = self._healthy()
        if not runner_ids:
            local = self._runners.local_env_runner
            return [local.sample_groups(list(requests), settings)] if local is not None else []
        shards = _deal(requests, runner_ids)
        return self._runners.foreach_env_runner(
            "sample_groups",
            kwargs=[{"requests": shard, "settings": settings} for shard in shards.values()],
            remote_worker_ids=list(shards),
            local_env_runner=False,
            timeout_seconds=self._config.sample_timeout_s,
        )

    def stream_groups(self, requests: Sequence[GroupRequest], settings: SampleSettings) -> Iterator[GroupSample]:
        """Play the requests like :meth:`sample_groups`, but yield every group as soon as it has ended, in any order.

        Raises:
            InfrastructureError: no group ended within ``sample_timeout_s`` seconds.
        """
        runner_ids = self._healthy()
        if not runner_ids:
            local = self._runners.local_env_runner
            if local is not None:
                yield from local.stream_groups(list(requests), settings)
            return
        streams = {
            self._actor(runner_id).stream_groups.remote(shard, settings): runner_id
            for runner_id, shard in _deal(requests, runner_ids).items()
        }
        while streams:
            ready, _ = ray.wait(list(streams), num_returns=1, timeout=self._config.sample_timeout_s)
            if not ready:
                raise InfrastructureError(
                    f"No episode ended within {self._config.sample_timeout_s:.0f} s; raise sample_timeout_s if they are "
                    "that long, else look at the env runners' logs."
                )
            try:
                yield ray.get(next(ready[0]))
            except StopIteration:
                del streams[ready[0]]
            except RayActorError as error:
                runner_id = streams.pop(ready[0])
                logger.warning("env runner %d died: %s", runner_id, error)
                self._runners._worker_manager.set_actor_state(runner_id, healthy=False)

    def repair(self) -> None:
        """Replace dead engines and runners; replacements get the current weights and engines."""
        if self._engines.probe_and_restart():
            self._connect()
        self.restore_runners()

    def restore_runners(self) -> list[int]:
        """Connect the env runners that Ray has restarted since; returns their ids."""
        restored = self._runners.probe_unhealthy_env_runners()
        if restored:
            self._connect(restored)
        return restored

    def _healthy(self) -> list[int]:
        runner_ids = self._runners.healthy_env_runner_ids()
        if runner_ids or self._runners.local_env_runner is not None:
            return runner_ids
        return self.restore_runners()

    def _actor(self, runner_id: int) -> ActorHandle:
        return self._runners._worker_manager.actors()[runner_id]

    def _connect(self, worker_ids: list[int] | None = None) -> None:
        handles = self._engines.handles
        self._runners.foreach_env_runner(
            lambda runner: runner.connect(handles),
            remote_worker_ids=worker_ids,
            local_env_runner=worker_ids is None,
            timeout_seconds=self._config.engine_start_timeout_s,
        )


def _deal(requests: Sequence[GroupRequest], runner_ids: Sequence[int]) -> dict[int, list[GroupRequest]]:
    """Requests by runner, dealt like cards; runners that get none are left out."""
    shards = {runner: list(requests[place :: len(runner_ids)]) for place, runner in enumerate(runner_ids)}
    return {runner: shard for runner, shard in shards.items() if shard}
