"""Create the engines of a run from its config."""

from __future__ import annotations

from typing import Any

from ray.util.placement_group import PlacementGroup

from trial_ray.config.run import RunSettings
from trial_ray.config.sampling import actor_range
from trial_ray.engines.pool import EnginePool
from trial_ray.errors import ConfigError


def create_engines(config: RunSettings, group: PlacementGroup | None = None, offset: int | None = None) -> EnginePool:
    """Create the engines that ``config`` describes, without waiting for them; errors as in ``EnginePool``.

    Args:
        config: config of the run.
        group: placement group of the engines; ``None``: the placement group of this process.
        offset: index of the first engine's bundle in the placement group; ``None``: any bundle.

    Raises:
        ConfigError: engine and learner would share the process of a Tune trial, which takes its whole bundle.
    """
    if config.colocate and config.num_learners == 0 and group is None and offset is not None:
        raise ConfigError("colocate in a sweep needs learners of their own: set .learners(num_learners=1) or more.")
    return EnginePool(**pool_arguments(config), placement_group=group, placement_group_bundle_offset=offset)


def pool_arguments(config: RunSettings) -> dict[str, Any]:
    """Return the arguments of ``EnginePool`` that ``config`` determines.

    Engines with equal arguments and the same weights respond alike.
    """
    arguments = {"max_model_len": config.row_tokens(), **config.engine_kwargs, "dtype": config.engine_dtype()}
    if config.colocate and config.engine == "vllm":
        arguments["enable_sleep_mode"] = True
    fewest, most = actor_range(config.num_engines)
    return {
        "engine": config.engine,
        "model_path": str(config.model_path),
        "num_engines": fewest,
        "max_engines": most,
        "engine_kwargs": arguments,
        "request_timeout_s": config.request_timeout_s,
        "num_cpus_per_engine": config.num_cpus_per_engine,
        "num_gpus_per_engine": config.num_gpus_per_engine,
        "custom_resources_per_engine": config.custom_resources_per_engine,
    }
