"""Resources of a run's actors: checked before any is created, and engines beside learners on one device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import ray
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from trial_ray.config.run import RunSettings
from trial_ray.config.sampling import fewest_and_most
from trial_ray.errors import ConfigError, ResourcesError

Bundle = dict[str, float]
Config = TypeVar("Config", bound=AlgorithmConfig)


def reserve(bundles: Sequence[Bundle], strategy: str, timeout_s: float) -> PlacementGroup:
    """Reserve bundles of resources, all at once; an autoscaler may start nodes for them meanwhile.

    Args:
        bundles: at least one that asks for something.
        strategy: how they are placed, as Ray names it.
        timeout_s: how long to wait for them.

    Raises:
        ResourcesError: the cluster did not offer them within ``timeout_s`` seconds; says what was asked for and what there is.
    """
    wanted = _asking(bundles)
    group: PlacementGroup = placement_group(wanted, strategy=strategy)
    if group.wait(timeout_s):
        return group
    remove_placement_group(group)
    total, free = ray.cluster_resources(), ray.available_resources()
    names = sorted({name for bundle in wanted for name in bundle})
    lines = [
        f"{name}: {sum(bundle.get(name, 0) for bundle in wanted):g} asked for in bundles of up to "
        f"{max(bundle.get(name, 0) for bundle in wanted):g}, {total.get(name, 0):g} in the cluster, "
        f"{free.get(name, 0):g} free"
        for name in names
    ]
    raise ResourcesError(
        f"The cluster did not offer what the run's actors ask for within resource_timeout_s={timeout_s:g} s ({'; '.join(lines)}). "
        "Ask for less (num_env_runners, num_engines, num_learners and what each takes), start nodes, or raise "
        "resource_timeout_s where an autoscaler needs longer."
    )


def require_resources(bundles: Sequence[Bundle], timeout_s: float) -> None:
    """Check that the cluster can hold the bundles, all at once and wherever they fit; errors as :func:`reserve`.

    Actors that ask for nothing, as Ray allows, fit anywhere.
    """
    if _asking(bundles):
        # No other strategy: outside placement groups Ray places actors one by one.
        remove_placement_group(reserve(bundles, "PACK", timeout_s))


LOOK_S = 5.0
"""How long to wait for what is free now."""


def with_fewer_learners(config: Config) -> Config | None:
    """The config with as many learners as the cluster has room for now; ``None`` where that is not one, or none may be missing.

    Updates do not depend on their number.
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
    """The bundles that ask for something, without amounts of 0, which Ray refuses in a placement group."""
    wanted = ({name: amount for name, amount in bundle.items() if amount} for bundle in bundles)
    return [bundle for bundle in wanted if bundle]


_LEARNERS: ContextVar[PlacementGroup | None] = ContextVar("placement group of the learners", default=None)


def with_engines(bundles: list[Bundle], config: RunSettings) -> list[Bundle]:
    """RLlib's bundles of a trial (main process, env runners, learners) and what the engines need.

    Where they share devices, an engine's resources are added to its learner's bundle, so that Ray places both on the same
    node and GPU; else engines have bundles of their own, at the end.
    """
    engine: Bundle = {"CPU": config.num_cpus_per_engine}
    if config.num_gpus_per_engine:
        engine["GPU"] = config.num_gpus_per_engine
    engine |= config.custom_resources_per_engine
    if not config.colocate:
        return bundles + [engine] * fewest_and_most(config.num_engines)[0]
    first = first_engine_bundle(bundles, config)
    shared = range(first, len(bundles) if first else 1)
    return [_added(bundle, engine) if index in shared else bundle for index, bundle in enumerate(bundles)]


def first_engine_bundle(bundles: list[Bundle], config: RunSettings) -> int:
    """Index of the first engine's bundle, engines being in consecutive ones."""
    if config.colocate and config.num_learners == 0:
        return 0  # the main process learns
    return len(bundles) - fewest_and_most(config.num_engines)[0]


def reserve_pairs(bundles: list[Bundle], config: RunSettings) -> PlacementGroup | None:
    """Outside Tune, which reserves all of a trial's bundles: reserve those that engines and learners share.

    Args:
        bundles: as from :func:`with_engines`.
        config: of the run.

    Returns:
        ``None`` where nothing is shared, or with a learner inside this process, whose device Ray does not manage.

    Raises:
        ResourcesError: the cluster did not offer them within ``resource_timeout_s`` seconds.
    """
    if not config.colocate or config.num_learners == 0:
        return None
    return reserve(
        bundles[first_engine_bundle(bundles, config) :], config.placement_strategy, config.resource_timeout_s
    )


@contextmanager
def learners_in(group: PlacementGroup | None) -> Iterator[None]:
    """Place the learners that RLlib creates meanwhile in this placement group."""
    token = _LEARNERS.set(group)
    try:
        yield
    finally:
        _LEARNERS.reset(token)


def learner_placement_group() -> PlacementGroup | None:
    """The group of :func:`learners_in`."""
    return _LEARNERS.get()


def check_colocation(config: RunSettings) -> None:
    """Refuse engines and learners that cannot share devices in pairs, and a transfer that would need other learners.

    Raises:
        ConfigError: says which settings disagree.
    """
    learners = max(1, config.num_learners)
    if config.transfer_backend() == "nccl" and not (config.num_learners and config.num_gpus_per_learner):
        raise ConfigError(
            "weight_transfer is 'nccl', which needs learners in processes and on GPUs of their own; set "
            ".learners(num_learners=..., num_gpus_per_learner=1), or 'object_store'."
        )
    if not config.colocate:
        return
    if config.num_engines != learners:
        raise ConfigError(
            f"colocate is set with num_engines={config.num_engines} and {learners} learners; expected as many engines as "
            "learners."
        )
    if config.max_staleness:
        raise ConfigError(
            f"colocate is set with max_staleness={config.max_staleness}: engines that sleep while the learner updates cannot "
            "sample meanwhile. Set max_staleness=0, or give engines devices of their own."
        )
    gpus = (config.num_gpus_per_engine, config.num_gpus_per_learner)
    if any(gpus) and (not all(gpus) or abs(sum(gpus) - 1) > 1e-6):
        raise ConfigError(
            f"colocate is set with num_gpus_per_engine={gpus[0]:g} and num_gpus_per_learner={gpus[1]:g}; expected shares of one "
            "GPU, for example 0.5 and 0.5."
        )


def _added(bundle: Bundle, engine: Bundle) -> Bundle:
    return {name: bundle.get(name, 0) + engine.get(name, 0) for name in {**bundle, **engine}}
