"""Actors of a run: resource requests, engines and learners on shared devices, progress and termination."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from trial_ray.config.run import RunSettings
from trial_ray.config.sampling import actor_range
from trial_ray.engines.pool import answers
from trial_ray.errors import ConfigError, ResourcesError
from trial_ray.process import Progress, forget, read_progress, runs_here
from trial_ray.ray_internals import actor_id

logger = logging.getLogger(__name__)

Bundle = dict[str, float]
Config = TypeVar("Config", bound=AlgorithmConfig)

ENV_RUNNER, ENGINE, LEARNER = "env runner", "engine", "learner"
ANSWER_S = 5.0
"""Seconds that an actor has to answer before it is stopped; an actor that does not answer in time is killed."""
BY_ITSELF_S = 2.0
"""Seconds that Ray has to end the process of a killed actor."""
GONE_S = 10.0
"""Seconds that the process of a killed actor has to disappear."""
LOOK_S = 5.0
"""Seconds to wait for resources that are free now."""


@dataclass(frozen=True, slots=True)
class RunActor:
    """One actor of a run.

    Attributes:
        kind: :data:`ENV_RUNNER`, :data:`ENGINE` or :data:`LEARNER`.
        index: index among the actors of its kind.
        handle: Ray's handle of the actor.
    """

    kind: str
    index: int
    handle: Any

    @property
    def name(self) -> str:
        """Human-readable name: kind and index."""
        return f"{self.kind} {self.index}"

    @property
    def id(self) -> str:
        """Ray's id of the actor, hexadecimal."""
        return actor_id(self.handle)

    def progress(self) -> Progress | None:
        """Return the actor's published progress; ``None`` if its process did not start."""
        return read_progress(self.id)

    def kill(self, restart: bool = False) -> None:
        """End the actor's process, even if it does not answer; with ``restart``, Ray starts another if the actor's options
        allow it."""
        ray.kill(self.handle, no_restart=not restart)


def answering(actors: Sequence[RunActor], timeout_s: float) -> list[RunActor]:
    """Return the actors that answer a call in time; busy and dead actors do not."""
    ready = answers([actor.handle.__ray_ready__.remote() for actor in actors], timeout_s)
    return [actor for actor, answer in zip(actors, ready, strict=True) if answer]


def end_processes(actors: Sequence[RunActor]) -> None:
    """Kill actors without restart, and wait until their processes on this node are gone.

    Ray requests that a process ends before it kills it. A stopped process would therefore be left behind if the driver exited
    first.
    """
    if not actors:
        return  # what follows would start Ray where there is none
    node = ray.get_runtime_context().get_node_id()
    local = [progress for actor in actors if (progress := actor.progress()) and progress.node == node]
    for actor in actors:
        actor.kill()
        forget(actor.id)
    began = time.monotonic()
    while (local := [progress for progress in local if runs_here(progress)]) and time.monotonic() - began < GONE_S:
        if time.monotonic() - began > BY_ITSELF_S:
            for progress in local:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(progress.pid, signal.SIGKILL)
        time.sleep(0.05)
    if local:
        logger.warning("the processes %s did not end within %.0f s", sorted(progress.pid for progress in local), GONE_S)


# -- resources ---------------------------------------------------------------------------------------------------------


def reserve(bundles: Sequence[Bundle], strategy: str, timeout_s: float) -> PlacementGroup:
    """Reserve bundles of resources, all at once; an autoscaler may start nodes for them in this time.

    Args:
        bundles: at least one bundle with a resource request.
        strategy: Ray's placement strategy.
        timeout_s: seconds to wait for the resources.

    Raises:
        ResourcesError: the cluster did not provide them within ``timeout_s`` seconds; the message lists requested, total and free
            resources.
    """
    wanted = _asking(bundles)
    group: PlacementGroup = placement_group(wanted, strategy=strategy)
    if group.wait(timeout_s):
        return group
    remove_placement_group(group)
    total, free = ray.cluster_resources(), ray.available_resources()
    names = sorted({name for bundle in wanted for name in bundle})
    lines = [
        f"{name}: {sum(bundle.get(name, 0) for bundle in wanted):g} requested in bundles of up to "
        f"{max(bundle.get(name, 0) for bundle in wanted):g}, {total.get(name, 0):g} in the cluster, {free.get(name, 0):g} free"
        for name in names
    ]
    raise ResourcesError(
        f"The cluster did not have the resources of the run's actors within resource_timeout_s={timeout_s:g} s "
        f"({'; '.join(lines)}). Request less (num_env_runners, num_engines, num_learners and the resources of each), start nodes, "
        "or raise resource_timeout_s if an autoscaler needs longer."
    )


def require_resources(bundles: Sequence[Bundle], timeout_s: float) -> None:
    """Check that the cluster can place all bundles at once, on any nodes; raises the errors of :func:`reserve`.

    Actors without resource requests, which Ray allows, fit anywhere.
    """
    if _asking(bundles):
        # No other strategy: outside placement groups Ray places actors one by one.
        remove_placement_group(reserve(bundles, "PACK", timeout_s))


def with_fewer_learners(config: Config) -> Config | None:
    """Return the config with fewer learners, as many as the cluster has room for now; ``None`` if there is no room for one, or if
    the config has at most one.

    Updates do not depend on the number of learners.
    """
    for number in range(config.num_learners - 1, 0, -1):
        fewer: Config = config.copy(copy_frozen=False).learners(num_learners=number)
        try:
            require_resources(fewer.algo_class.default_resource_request(fewer).bundles[1:], LOOK_S)
        except (ConfigError, ResourcesError):
            continue
        fewer.validate()
        return fewer
    return None


def _asking(bundles: Sequence[Bundle]) -> list[Bundle]:
    """Return the bundles with a resource request, without amounts of 0, which Ray rejects in a placement group."""
    wanted = ({name: amount for name, amount in bundle.items() if amount} for bundle in bundles)
    return [bundle for bundle in wanted if bundle]


def with_engines(bundles: list[Bundle], config: RunSettings) -> list[Bundle]:
    """Return RLlib's bundles of a trial (main process, env runners, learners), with the resources of the engines added.

    If they share devices, an engine's resources are added to its learner's bundle, so Ray places both on the same node and GPU.
    Otherwise, the engines have separate bundles at the end.
    """
    engine: Bundle = {"CPU": config.num_cpus_per_engine}
    if config.num_gpus_per_engine:
        engine["GPU"] = config.num_gpus_per_engine
    engine |= config.custom_resources_per_engine
    number, _ = actor_range(config.num_engines)
    if not config.colocate:
        return bundles + [engine] * number
    first = first_engine_bundle(bundles, config)
    last = first + number
    both = [
        {name: bundle.get(name, 0) + engine.get(name, 0) for name in bundle | engine} for bundle in bundles[first:last]
    ]
    return [*bundles[:first], *both, *bundles[last:]]


def first_engine_bundle(bundles: list[Bundle], config: RunSettings) -> int:
    """Return the index of the first engine's bundle; the bundles of the engines are consecutive."""
    if config.colocate and config.num_learners == 0:
        return 0  # the main process learns
    return len(bundles) - actor_range(config.num_engines)[0]


def reserve_pairs(bundles: list[Bundle], config: RunSettings) -> PlacementGroup | None:
    """Reserve the bundles that engines and learners share, in runs outside Tune (Tune reserves all bundles of a trial).

    Args:
        bundles: bundles from :func:`with_engines`.
        config: config of the run.

    Returns:
        The placement group; ``None`` if nothing is shared, or if the learner is inside this process, since Ray does not manage
        its device.

    Raises:
        ResourcesError: the cluster did not provide the resources within ``resource_timeout_s`` seconds.
    """
    if not config.colocate or config.num_learners == 0:
        return None
    return reserve(
        bundles[first_engine_bundle(bundles, config) :], config.placement_strategy, config.resource_timeout_s
    )


LEARNERS_PLACED: ContextVar[PlacementGroup | None] = ContextVar("placement group of the learners", default=None)


@contextlib.contextmanager
def learners_in(group: PlacementGroup | None) -> Iterator[None]:
    """Place the learners that RLlib creates inside this context in ``group``."""
    token = LEARNERS_PLACED.set(group)
    try:
        yield
    finally:
        LEARNERS_PLACED.reset(token)
