"""Resource requests of a run's actors, and placement groups for engines and learners that share devices."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import TypeVar

import ray
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from trial_ray.config.run import RunSettings
from trial_ray.config.sampling import actor_range
from trial_ray.engines.pool import EnginePool
from trial_ray.errors import ConfigError, ResourcesError

Bundle = dict[str, float]
Config = TypeVar("Config", bound=AlgorithmConfig)

FREE_RESOURCES_S = 5.0
"""Time limit in seconds for reserving resources that are free already."""


def reserve(bundles: Sequence[Bundle], strategy: str, timeout_s: float) -> PlacementGroup:
    """Reserve all bundles of resources, and return their placement group; an autoscaler may start nodes for them meanwhile.

    Args:
        bundles: at least one bundle with a resource request.
        strategy: Ray's placement strategy.
        timeout_s: seconds to wait for the resources.

    Raises:
        ResourcesError: the cluster did not provide them within ``timeout_s`` seconds; the message lists requested, total and free
            resources.
    """
    requested = _with_requests(bundles)
    group: PlacementGroup = placement_group(requested, strategy=strategy)
    if group.wait(timeout_s):
        return group
    remove_placement_group(group)
    total, free = ray.cluster_resources(), ray.available_resources()
    names = sorted({name for bundle in requested for name in bundle})
    lines = [
        f"{name}: {sum(bundle.get(name, 0) for bundle in requested):g} requested in bundles of up to "
        f"{max(bundle.get(name, 0) for bundle in requested):g}, {total.get(name, 0):g} in the cluster, {free.get(name, 0):g} free"
        for name in names
    ]
    raise ResourcesError(
        f"The cluster did not have the resources of the run's actors within resource_timeout_s={timeout_s:g} s "
        f"({'; '.join(lines)}). Request less (num_env_runners, num_engines, num_learners and the resources of each), start nodes, "
        "or raise resource_timeout_s if an autoscaler needs longer."
    )


def require_resources(bundles: Sequence[Bundle], timeout_s: float) -> None:
    """Check that the cluster can place all bundles at once, on any nodes; raises the same errors as :func:`reserve`.

    Actors without resource requests, which Ray allows, fit anywhere.
    """
    if _with_requests(bundles):
        # PACK may spread the bundles over any nodes, as Ray does with actors outside placement groups.
        remove_placement_group(reserve(bundles, "PACK", timeout_s))


def with_fewer_learners(config: Config) -> Config | None:
    """Return a copy of the config with fewer learners: the largest number for which the cluster has free resources now.

    The result is ``None`` if the free resources suffice for no learner, or if ``config`` has at most one learner. The result of
    an update does not depend on the number of learners.
    """
    for number in range(config.num_learners - 1, 0, -1):
        fewer: Config = config.copy(copy_frozen=False).learners(num_learners=number)
        try:
            require_resources(fewer.algo_class.default_resource_request(fewer).bundles[1:], FREE_RESOURCES_S)
        except (ConfigError, ResourcesError):
            continue
        fewer.validate()
        return fewer
    return None


def _with_requests(bundles: Sequence[Bundle]) -> list[Bundle]:
    """Return the bundles with a resource request, without amounts of 0, which Ray rejects in a placement group."""
    requested = ({name: amount for name, amount in bundle.items() if amount} for bundle in bundles)
    return [bundle for bundle in requested if bundle]


def with_engines(bundles: list[Bundle], config: RunSettings) -> list[Bundle]:
    """Return RLlib's bundles of a trial (main process, env runners, learners), with the resources of the engines added.

    If engines and learners share devices, an engine's resources are added to its learner's bundle, so Ray places both on the
    same node and GPU. Otherwise, the engines have separate bundles at the end.
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
        return 0  # The main process contains the learner, so the engine shares its bundle.
    return len(bundles) - actor_range(config.num_engines)[0]


def create_engines(config: RunSettings, group: PlacementGroup | None, bundles: list[Bundle] | None) -> EnginePool:
    """Create the engines that ``config`` describes, without waiting for them; raises the same errors as ``EnginePool``.

    Args:
        config: config of the run.
        group: placement group of the engines, or ``None`` for the placement group of this process.
        bundles: bundles of this process's Tune trial; ``None`` outside Tune.

    Raises:
        ConfigError: ``colocate`` is set in a Tune trial without separate learners: the trial's process, which contains the
            learner, then uses the whole bundle that the engine would share.
    """
    offset = None if group is None else 0
    if group is None and bundles is not None:
        offset = first_engine_bundle(bundles, config)
        if config.colocate and config.num_learners == 0:
            raise ConfigError("colocate in a sweep needs learners of their own: set .learners(num_learners=1) or more.")
    return EnginePool(**config.engine_pool_arguments(), placement_group=group, placement_group_bundle_offset=offset)


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
