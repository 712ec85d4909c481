"""Inputs that a run's settings name: data and tasks of its environments, and its first policy."""

from __future__ import annotations

from trial_ray.algorithms.initial_policy import policy_folder, require_initial_policy
from trial_ray.config.run import RunSettings
from trial_ray.engines.pool import require_engine, require_engine_arguments
from trial_ray.evaluation.panels import Panel
from trial_ray.rollout.engines import pool_arguments


def require_inputs(config: RunSettings) -> None:
    """Check that all inputs are there, before Ray starts; a model on the hub is fetched into the hub's cache.

    Raises:
        ConfigError: a model, an environment, a split or an engine is not known or not to be had, a split has too few tasks, or the
            engine cannot be started with its arguments and this model.
        MissingDependencyError: the engine or a packaged model is not installed.
        TrialEnvError: the data of an environment are missing.
    """
    require_engine(config.engine, config.num_gpus_per_engine)
    require_initial_policy(config)
    for entry in config.environment_entries():
        if entry.weight:
            entry.tasks()
    for entry in config.evaluation_entries():
        Panel.choose(entry.env_id, entry.split, entry.tasks(), config.evaluation_num_tasks)
    path = config.model_path if config.warm_start is None else config.warm_start.get("model_path")
    if path is not None:
        arguments = pool_arguments(config)["engine_kwargs"]
        require_engine_arguments(config.engine, policy_folder(str(path)), arguments, config.num_gpus_per_engine)
