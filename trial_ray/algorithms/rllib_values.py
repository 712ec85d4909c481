"""RLlib's settings that work here, with the values that they take, and those that may be set without an effect.

With :data:`~trial_ray.algorithms.rllib_settings.UNREAD`, each public setting of RLlib's config is in one of three classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.utils import force_list
from ray.rllib.utils.metrics.stats import StatsBase

from trial_ray.algorithms.rllib_settings import stored_name
from trial_ray.config.declare import is_search
from trial_ray.errors import ConfigError


def _is_whole(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


def _are_resources(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(key, str) and _is_number(each) for key, each in value.items())


def _are_functions(value: Any) -> bool:
    return all(map(callable, force_list(value)))


def _are_callback_classes(value: Any) -> bool:
    return all(
        callable(each) and (not isinstance(each, type) or issubclass(each, RLlibCallback)) for each in force_list(value)
    )


def _are_stats_classes(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(each, type) and issubclass(each, StatsBase) for each in value.values()
    )


_LOG_LEVELS = ("DEBUG", "INFO", "WARN", "WARNING", "ERROR")
_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
_HOOKS = (
    "algorithm_init env_runners_recreated checkpoint_loaded environment_created episode_created episode_start episode_step "
    "episode_end evaluate_start evaluate_end sample_end train_result"
)
_VALUES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "create_local_env_runner restart_failed_env_runners ignore_env_runner_failures validate_env_runners_after_construction "
    "log_gradients log_sys_usage": ("a bool", lambda value: type(value) is bool),
    "num_cpus_for_main_process num_cpus_per_env_runner num_gpus_per_env_runner num_gpus_per_learner "
    "delay_between_env_runner_restarts_s env_runner_health_probe_timeout_s env_runner_restore_timeout_s": (
        "a number of at least 0",
        _is_number,
    ),
    "num_cpus_per_learner": ("a number of at least 0, or 'auto'", lambda value: value == "auto" or _is_number(value)),
    "max_num_env_runner_restarts num_consecutive_env_runner_failures_tolerance local_gpu_idx": (
        "an int of at least 0",
        _is_whole,
    ),
    "max_requests_in_flight_per_env_runner": ("an int of at least 1", lambda value: _is_whole(value) and value > 0),
    "evaluation_interval": ("an int of at least 0, or None", lambda value: value is None or _is_whole(value)),
    "custom_resources_for_main_process custom_resources_per_env_runner custom_resources_per_learner": (
        "a dict of numbers of at least 0 by resource",
        _are_resources,
    ),
    "placement_strategy": (f"one of {', '.join(_STRATEGIES)}", lambda value: value in _STRATEGIES),
    "log_level": (f"one of {', '.join(_LOG_LEVELS)}", lambda value: value in _LOG_LEVELS),
    "env_config": ("a dict", lambda value: isinstance(value, Mapping)),
    "callbacks_class": ("a class derived from RLlibCallback, or a list of them", _are_callback_classes),
    " ".join(f"callbacks_on_{hook}" for hook in _HOOKS.split()): ("a function, or a list of them", _are_functions),
    "stats_cls_lookup": ("a dict of classes derived from StatsBase", _are_stats_classes),
    "rl_module_spec": ("an RLModuleSpec", lambda value: value is None or isinstance(value, RLModuleSpec)),
}
VALUES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    name: check for names, check in _VALUES.items() for name in names.split()
}
"""What is expected of a setting, in words and as a function, by the setting's name."""
CHECKED_ELSEWHERE = frozenset(
    {
        "algo_class", "env", "env_runner_cls", "grad_clip", "grad_clip_by", "learner_class", "learner_connector", "lr",
        "num_env_runners", "num_epochs", "num_learners", "policies", "sample_timeout_s", "seed",
    }
)  # fmt: skip
"""Settings that work, with values that RLlib or other checks of this package's config require."""
HARMLESS = {
    "learner_config_dict": "nothing here reads it; a learner_class of your own may",
    "simple_optimizer": "RLlib sets it in its checks; it is of RLlib's old API stack",
    "in_evaluation": "RLlib sets it in the copy that it makes for evaluation",
}
"""Settings that have no effect and are accepted, with the reason."""


def check_values(config: Any) -> None:
    """Reject values of RLlib's settings that RLlib itself accepts, and that fail or are ignored later.

    Raises:
        ConfigError: there is such a value; the message contains what is expected.
    """
    for name, (expected, is_valid) in VALUES.items():
        value = vars(config)[stored_name(name, vars(config))]
        if not is_search(value) and not is_valid(value):
            raise ConfigError(f"RLlib's {name} is {value!r:.100}, expected {expected}.")
