"""Settings recorded in another user's folder: only settings that cannot name code, files or servers are read."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from trial_ray.config.declare import RLlibSettings
from trial_ray.files import REFERENCE

RLLIB = frozenset(RLlibSettings.__annotations__) | {
    "custom_resources_per_env_runner",
    "custom_resources_per_learner",
    "grad_clip_by",
    "num_cpus_per_env_runner",
    "num_gpus_per_env_runner",
}
"""RLlib's settings that are read; the other settings keep their defaults."""
ENGINE = frozenset(
    {
        "batch_invariant",
        "block_size",
        "device",
        "dtype",
        "enable_chunked_prefill",
        "enable_prefix_caching",
        "enable_sleep_mode",
        "enforce_eager",
        "gpu_memory_utilization",
        "kv_cache_dtype",
        "kv_cache_gib",
        "kv_cache_memory_bytes",
        "log_level",
        "max_batch",
        "max_model_len",
        "max_num_batched_tokens",
        "max_num_seqs",
        "num_threads",
        "seed",
        "tensor_parallel_size",
        "v2_model_runner",
    }
)
"""Arguments of engines that are read. vLLM's ``EngineArgs`` has others, which import classes or load files."""
ENVIRONMENT = frozenset(
    {
        "action_field",
        "actions",
        "dataset",
        "difficulty",
        "families",
        "game",
        "list_actions",
        "observation_field",
        "simplifications",
        "split",
        "task",
    }
)
"""Arguments of this package's environments with texts that select an option of the environment. Numbers are read under any name."""
MOST_NAMED = 20

logger = logging.getLogger(__name__)


def require_data(
    settings: Mapping[str, Any], known: Iterable[str], defaults: Mapping[str, Any], source: object
) -> dict[str, Any]:
    """Return the settings without values that could name code, files or servers.

    A warning lists the dropped values that are not defaults.

    Args:
        settings: the recorded settings.
        known: names of the settings to read.
        defaults: defaults of all settings.
        source: the file with the recorded settings.

    Raises:
        TypeError, ValueError, AttributeError: a setting differs in form from the settings that a run records.
    """
    left_out: list[str] = []
    read = {name: _data(name, settings[name], left_out) for name in settings.keys() & set(known)}
    left_out += [name for name in settings.keys() & defaults.keys() - read.keys() if settings[name] != defaults[name]]
    if left_out:
        named = ", ".join(f"{name!r:.80}" for name in sorted(set(left_out))[:MOST_NAMED])
        logger.warning(
            "%s was not written by this user on this machine; its settings that may name code, files or servers are ignored: %s%s. "
            "Set the ones that you want with --set.",
            source,
            named,
            ", ..." if len(left_out) > MOST_NAMED else "",
        )
    return read


def _data(name: str, value: Any, left_out: list[str]) -> Any:
    if not value:
        return value
    if name == "env":
        return _without_module(name, value, left_out)
    if name == "engine_kwargs":
        left_out += [f"{name}.{key}" for key in value.keys() - ENGINE]
        return {key: inner for key, inner in value.items() if key in ENGINE and not isinstance(inner, Mapping | list)}
    if name in ("env_config", "evaluation_env_config"):
        return _arguments(name, value, left_out)
    if name == "environments":
        return [
            [_without_module(name, env_id, left_out), _arguments(name, arguments, left_out), weight]
            for env_id, arguments, weight in value
        ]
    if name == "warm_start":
        return {key: _data(key, inner, left_out) for key, inner in value.items()}
    return value


def _without_module(name: str, env_id: str, left_out: list[str]) -> str:
    """The id without the module before it, which Gymnasium would import."""
    module, _, registered = env_id.rpartition(":")
    if module:
        left_out.append(f"{name} {module}:")
    return registered


def _arguments(name: str, arguments: Mapping[str, Any], left_out: list[str]) -> dict[str, Any]:
    """Keyword arguments of an environment, or of each environment by name."""
    read = {}
    for key, value in arguments.items():
        if isinstance(value, Mapping):
            read[key] = _arguments(f"{name}.{key}", value, left_out)
        elif (key in ENVIRONMENT and not _names_variable(value)) or value is None or type(value) in (int, float):
            read[key] = value
        else:
            left_out.append(f"{name}.{key}")
    return read


def _names_variable(value: Any) -> bool:
    """Return whether a value refers to a secret of this user."""
    return any(
        isinstance(each, str) and REFERENCE.search(each) for each in (value if isinstance(value, list) else [value])
    )
