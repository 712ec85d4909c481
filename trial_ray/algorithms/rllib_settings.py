"""Checks of RLlib's settings, and the calls by which RLlib builds module specs, learners and the algorithm from a config.

A setting of RLlib either works here (``VALUES``, ``CHECKED_ELSEWHERE``), or is accepted without an effect (``HARMLESS``), or is
rejected with the setting to use instead or the reason (``UNREAD``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping
from inspect import getattr_static
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ray.rllib.algorithms.algorithm_config import DEPRECATED_VALUE, AlgorithmConfig
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.utils import force_list
from ray.rllib.utils.metrics.stats import StatsBase
from ray.util.placement_group import PlacementGroup

from trial_ray.algorithms.placement import LEARNERS_PLACED
from trial_ray.config.declare import is_search
from trial_ray.config.run import RunSettings
from trial_ray.errors import ConfigError, by_name
from trial_ray.rollout.callbacks import NEVER_CALLED

if TYPE_CHECKING:
    from ray.rllib.algorithms.algorithm import Algorithm

    from trial_ray.algorithms.learner_group import PolicyLearnerGroup
    from trial_ray.learner.learner import GRPOLearner

# The documentation lists these settings in this order.
_REASONS = {
    "minibatch_size": "set minibatch_rows, in turn rows over all learners",
    "shuffle_batch_per_epoch": "set shuffle",
    "train_batch_size train_batch_size_per_learner": (
        "an iteration is one update of tasks_per_iteration groups; set tasks_per_iteration and group_size"
    ),
    "gamma": "returns are not discounted; methods that discount have their own settings, such as step_discount",
    "model model_config": "set model_path",
    "optimizer _torch_lr_scheduler_classes": "AdamW is used; set lr, which may be a schedule, weight_decay and adam_betas",
    "num_gpus": "set num_gpus_per_learner and num_gpus_per_engine",
    "torch_compile_learner torch_compile_learner_what_to_compile torch_compile_learner_dynamo_mode "
    "torch_compile_learner_dynamo_backend": "set compile_layers",
    "torch_compile_worker torch_compile_worker_dynamo_mode torch_compile_worker_dynamo_backend": (
        "env runners have no model; set compile_layers"
    ),
    "torch_ddp_kwargs": "learners add up their gradients without DDP",
    "torch_skip_nan_gradients": "steps with gradients that are not finite are skipped; set max_skipped_updates",
    "_torch_grad_scaler_class": "gradients are not scaled; set compute_dtype",
    "add_default_connectors_to_learner_pipeline": (
        "RLlib's default connectors make batches of RLlib's episodes, and learners are given groups of trajectories"
    ),
    "num_aggregator_actors_per_learner max_requests_in_flight_per_aggregator_actor": (
        "learners fetch groups from the env runners"
    ),
    "min_time_s_per_iteration min_sample_timesteps_per_iteration min_train_timesteps_per_iteration": (
        "an iteration is one update of tasks_per_iteration groups"
    ),
    "num_envs_per_env_runner": "set max_episodes_in_flight",
    "rollout_fragment_length batch_mode": "rollouts are whole episodes, of at most the environment's max_turns",
    "explore": "set temperature and evaluation_temperature",
    "exploration_config": "set temperature",
    "episode_lookback_horizon": "set history_window",
    "env_to_module_connector module_to_env_connector add_default_connectors_to_env_to_module_pipeline "
    "add_default_connectors_to_module_to_env_pipeline": (
        "env runners have no model; the prompt template of an EnvironmentAdapter writes prompts and reads actions"
    ),
    "observation_space action_space observation_filter normalize_actions clip_actions compress_observations preprocessor_pref "
    "episodes_to_numpy": "observations and actions are texts",
    "action_mask_key": "info['admissible_actions'] lists the actions",
    "disable_env_checking": "environments are checked before every run",
    "clip_rewards": "set reward_scale",
    "render_env": "trial-ray inspect shows what was played",
    "restart_failed_sub_environments": "an environment that fails is closed, and its rollout is counted as failed",
    "gym_env_vectorize_mode remote_worker_envs remote_env_batch_wait_ms": "set environment_processes",
    "metrics_num_episodes_for_smoothing keep_per_episode_custom_metrics metrics_episode_collection_timeout_s": (
        "metrics are those of one iteration"
    ),
    "merge_env_runner_states broadcast_env_runner_states use_env_runner_state_server "
    "env_runner_state_server_max_concurrency": "env runners have no learned state",
    "evaluation_duration evaluation_duration_unit": "set evaluation_num_tasks",
    "evaluation_sample_timeout_s": "set sample_timeout_s",
    "evaluation_config": "evaluation has its own settings, such as evaluation_temperature and evaluation_env_config",
    "evaluation_num_env_runners evaluation_parallel_to_training evaluation_unhealthy_workers_timeout_s "
    "evaluation_error_after_n_consecutive_skips": (
        "the env runners of training play the evaluation set between two iterations"
    ),
    "evaluation_auto_duration_min_env_steps_per_sample evaluation_auto_duration_max_env_steps_per_sample "
    "evaluation_force_reset_envs_before_iteration": "an evaluation plays each of its tasks once, from the reset",
    "custom_evaluation_function": "evaluation_split chooses the evaluation set, and on_evaluate_end is given its result",
    "max_requests_in_flight_per_learner": "updates are not asynchronous",
    "create_env_on_local_worker": "set num_env_runners=0 to play in the driver",
    "policy_map_capacity policy_states_are_swappable policy_mapping_fn policies_to_train count_steps_by "
    "observation_fn algorithm_config_overrides_per_module": ("one policy is trained"),
    "input_ input_config input_read_method input_read_method_kwargs input_read_schema input_read_episodes "
    "input_read_sample_batches input_read_batch_size input_filesystem input_filesystem_kwargs input_compress_columns "
    "input_spaces_jsonable materialize_data materialize_mapped_data map_batches_kwargs iter_batches_kwargs "
    "ignore_final_observation offline_data_class prelearner_class prelearner_buffer_class prelearner_buffer_kwargs "
    "prelearner_module_synch_period prelearner_use_recorded_module_states dataset_num_iters_per_learner "
    "actions_in_input_normalized postprocess_inputs shuffle_buffer_size offline_sampling output output_config "
    "output_compress_columns output_max_file_size output_max_rows_per_file output_write_remaining_data output_write_method "
    "output_write_method_kwargs output_filesystem output_filesystem_kwargs output_write_episodes "
    "off_policy_estimation_methods ope_split_batch_by_episode offline_evaluation_interval offline_evaluation_type "
    "offline_eval_runner_class offline_loss_for_module_fn offline_evaluation_duration "
    "offline_evaluation_parallel_to_training offline_evaluation_timeout_s num_offline_eval_runners "
    "num_cpus_per_offline_eval_runner num_gpus_per_offline_eval_runner custom_resources_per_offline_eval_runner "
    "restart_failed_offline_eval_runners ignore_offline_eval_runner_failures max_num_offline_eval_runner_restarts "
    "offline_eval_runner_restore_timeout_s max_requests_in_flight_per_offline_eval_runner "
    "validate_offline_eval_runners_after_construction offline_eval_runner_health_probe_timeout_s "
    "offline_eval_rl_module_inference_only broadcast_offline_eval_runner_states offline_eval_batch_size_per_runner "
    "dataset_num_iters_per_eval_runner": (
        "training and evaluation play episodes; nothing is read from or written as offline data"
    ),
    "export_native_model_files checkpoint_trainable_policies_only": (
        "checkpoints have a Hugging Face folder, which trial-ray export copies"
    ),
    "extra_python_environs_for_driver extra_python_environs_for_worker": "set environment variables before Ray starts",
    "eager_tracing eager_max_retraces tf_session_args local_tf_session_args enable_tf1_exec_eagerly "
    "sync_filters_on_rollout_workers_timeout_s framework_str "
    "enable_rl_module_and_learner enable_env_runner_and_connector_v2 sample_collector use_worker_filter_stats "
    "update_worker_filter_stats sampler_perf_stats_ema_coef fake_sampler": (
        "this package is written for torch and RLlib's new API stack"
    ),
}
UNREAD = by_name(_REASONS) | {f"callbacks_{hook}": f"it is never called: {why}" for hook, why in NEVER_CALLED.items()}
UNREAD |= {
    name: "RLlib has deprecated it"
    for name, value in vars(AlgorithmConfig()).items()
    if (value is DEPRECATED_VALUE and name != "simple_optimizer") or name == "replay_sequence_length"
}
"""Reasons why RLlib's settings have no effect here, or the settings to use instead, by name."""


_LOSS = "a Method in a file of its own sets the loss (docs/methods.md, How to add a method)"
UNCALLED_HOOKS = {
    "learner_class": by_name(
        {
            "compute_loss compute_loss_for_module compute_losses": _LOSS,
            "compute_gradients _update _uncompiled_update": (
                "an update accumulates the gradients of microbatches itself; override postprocess_gradients to change them; "
                f"{_LOSS}"
            ),
            "update_from_batch update_from_episodes": "update() is called with training_data",
            "_convert_batch_type _create_iterator_if_necessary _make_batch_if_necessary _set_slicing_by_batch_id": (
                "the learner makes token batches of whole groups itself; a learner_connector may change the groups"
            ),
            "_log_metrics _log_steps_trained_metrics _compute_off_policyness": (
                "override after_gradient_based_update to log metrics"
            ),
            "_get_optimizer_state _set_optimizer_state _get_tensor_variable": "override get_state and set_state",
            "should_module_be_updated add_module remove_module": "one policy is trained",
            "_reset": "no learner is reset",
        }
    ),
    "env_runner_cls": by_name(
        {
            "sample sample_get_state_and_metrics": "groups of rollouts are sampled, by play_group",
            "get_metrics": "groups carry the metrics that callbacks log",
            "make_env _try_env_reset _try_env_step _reset_envs_and_episodes": (
                "environments are created and stepped per rollout; register an environment with Gymnasium"
            ),
            "make_module _convert_to_tensor": "env runners have no model",
            "_log_env_steps": "override play_group",
        }
    ),
}
"""Reasons why this package never calls certain methods that RLlib calls: first by the setting that selects a user's class, such
as ``learner_class``, and then by the name of the class's method."""


def refuse_uncalled(setting: str, chosen: type, base: type) -> None:
    """Reject a user's class that overrides methods which RLlib calls, but which this package never calls.

    Args:
        setting: setting that chooses the class, a key of :data:`UNCALLED_HOOKS`.
        chosen: the user's class.
        base: this package's class from which ``chosen`` is derived.

    Raises:
        ConfigError: the class overrides such a method; the message names an alternative.
    """
    for name, why in UNCALLED_HOOKS.get(setting, {}).items():
        if getattr_static(chosen, name, None) is not getattr_static(base, name, None):
            raise ConfigError(
                f"{setting} is {chosen.__name__}, which defines {name}(), but nothing calls it here: {why}."
            )


def stored_name(name: str, settings: Container[str]) -> str:
    """Return the name of a setting's attribute; RLlib stores some settings under their name with a leading underscore."""
    return f"_{name}" if f"_{name}" in settings else name


def refuse_unread(config: Any) -> None:
    """Reject settings that would have no effect.

    Args:
        config: config of the run; RLlib's copy for evaluation is not checked, since RLlib changes settings in it.

    Raises:
        ConfigError: such a setting was changed; the message contains its name, its value and the setting to use instead.
    """
    if config.in_evaluation:
        return
    defaults, settings = vars(type(config)()), vars(config)
    for name, why in UNREAD.items():
        stored = stored_name(name, defaults)
        if settings.get(stored) != defaults.get(stored):
            raise ConfigError(f"RLlib's {name} is {settings[stored]!r:.100}, but has no effect here: {why}.")


# -- allowed values of supported settings ----------------------------------------------------------------------------


def _is_whole(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


def _are_resources(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(key, str) and _is_number(amount) for key, amount in value.items()
    )


def _are_callback_classes(value: Any) -> bool:
    return all(
        callable(callback) and (not isinstance(callback, type) or issubclass(callback, RLlibCallback))
        for callback in force_list(value)
    )


def _are_stats_classes(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(stats, type) and issubclass(stats, StatsBase) for stats in value.values()
    )


_LOG_LEVELS = ("DEBUG", "INFO", "WARN", "WARNING", "ERROR")
_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
VALUES: dict[str, tuple[str, Callable[[Any], bool]]] = by_name(
    {
        "create_local_env_runner restart_failed_env_runners ignore_env_runner_failures validate_env_runners_after_construction "
        "log_gradients log_sys_usage": ("a bool", lambda value: type(value) is bool),
        "num_cpus_for_main_process num_cpus_per_env_runner num_gpus_per_env_runner num_gpus_per_learner "
        "delay_between_env_runner_restarts_s env_runner_health_probe_timeout_s env_runner_restore_timeout_s": (
            "a number of at least 0",
            _is_number,
        ),
        "num_cpus_per_learner": (
            "a number of at least 0, or 'auto'",
            lambda value: value == "auto" or _is_number(value),
        ),
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
        "callbacks_on_algorithm_init callbacks_on_env_runners_recreated callbacks_on_checkpoint_loaded "
        "callbacks_on_environment_created callbacks_on_episode_created callbacks_on_episode_start callbacks_on_episode_step "
        "callbacks_on_episode_end callbacks_on_evaluate_start callbacks_on_evaluate_end callbacks_on_sample_end "
        "callbacks_on_train_result": (
            "a function, or a list of them",
            lambda value: all(map(callable, force_list(value))),
        ),
        "stats_cls_lookup": ("a dict of classes derived from StatsBase", _are_stats_classes),
        "rl_module_spec": ("an RLModuleSpec", lambda value: value is None or isinstance(value, RLModuleSpec)),
    }
)
"""Allowed values of RLlib's settings, in words and as a check, by the setting's name."""
CHECKED_ELSEWHERE = frozenset(
    {
        "algo_class", "env", "env_runner_cls", "grad_clip", "grad_clip_by", "learner_class", "learner_connector", "lr",
        "num_env_runners", "num_epochs", "num_learners", "policies", "sample_timeout_s", "seed",
    }
)  # fmt: skip
"""Settings of RLlib that work; RLlib or other parts of this package check their values."""
HARMLESS = {
    "learner_config_dict": "nothing here reads it; a learner_class of your own may",
    "simple_optimizer": "RLlib sets it in its checks; it is of RLlib's old API stack",
    "in_evaluation": "RLlib sets it in the config that it copies for evaluation",
}
"""Settings of RLlib that are accepted without an effect, with the reasons."""


def check_values(config: Any) -> None:
    """Reject values of RLlib's settings that RLlib itself accepts, and that fail or are ignored later.

    Raises:
        ConfigError: there is such a value; the message contains the expected values.
    """
    for name, (expected, is_valid) in VALUES.items():
        value = vars(config)[stored_name(name, vars(config))]
        if not is_search(value) and not is_valid(value):
            raise ConfigError(f"RLlib's {name} is {value!r:.100}, expected {expected}.")


class BuildCalls(RunSettings, AlgorithmConfig):
    """Base class of :class:`~trial_ray.algorithms.grpo.GRPOConfig` with RLlib's calls that build specs, learners and algorithms.

    Specs and learners are built from a model folder. A model on the hub is downloaded once; the folder of a packaged model or of
    a warm start is created once. All observations and actions are texts, so ``env`` and ``spaces`` can be omitted.
    """

    def get_default_learner_class(self) -> type:
        """Return the class of the learner, which computes this method's loss."""
        from trial_ray.learner.learner import GRPOLearner

        return GRPOLearner

    def get_default_rl_module_spec(self) -> RLModuleSpec:
        """Return the spec of the causal LM that is trained."""
        from trial_ray.models.module import CausalLMModule

        return RLModuleSpec(module_class=CausalLMModule)

    def get_rl_module_spec(
        self, env: Any = None, spaces: Any = None, inference_only: bool | None = None
    ) -> RLModuleSpec:
        """Return the spec whose ``build()`` creates the module; takes the arguments of RLlib's method."""
        return AlgorithmConfig.get_rl_module_spec(self._with_folder(), None, spaces or _text_spaces(), inference_only)

    def get_multi_rl_module_spec(self, *, env: Any = None, spaces: Any = None, **kwargs: Any) -> MultiRLModuleSpec:
        """Return the spec of a ``MultiRLModule`` that contains the module; takes the arguments of RLlib's method."""
        config = self._with_folder()
        return AlgorithmConfig.get_multi_rl_module_spec(config, spaces=spaces or _text_spaces(), **kwargs)

    def build_learner(self, *, env: Any = None, spaces: Any = None) -> GRPOLearner:
        """Build a learner in this process; takes the arguments of RLlib's method."""
        return AlgorithmConfig.build_learner(self._with_folder(), spaces=spaces or _text_spaces())

    def build_learner_group(
        self, *, rl_module_spec: Any = None, placement_group: PlacementGroup | None = None, **kwargs: Any
    ) -> PolicyLearnerGroup:
        """Build the learners; if they share devices with engines, they are placed in the engines' placement group."""
        from trial_ray.algorithms.learner_group import PolicyLearnerGroup

        config = self._with_folder()
        return PolicyLearnerGroup(
            config=config.copy(),
            module_spec=rl_module_spec or config.get_multi_rl_module_spec(**kwargs),
            placement_group=placement_group or LEARNERS_PLACED.get(),
        )

    def build_algo(self, env: str | None = None, use_copy: bool = True) -> Algorithm:
        """Build the algorithm.

        Args:
            env: id of the environment. If it is given, this method first calls ``environment(env)`` on this config, which also
                applies the defaults of the environment's adapter.
            use_copy: whether the algorithm receives a copy of this config.
        """
        if env is not None:
            self.environment(env)
        return super().build_algo(use_copy=use_copy)

    def _with_folder(self) -> Self:
        """Return the config if its model is a folder, else a copy whose model was downloaded or created; see ``resolved``."""
        if self.warm_start is None and Path(str(self.model_path)).is_dir():
            return self
        from trial_ray.algorithms.startup import resolved

        return resolved(self, None)

    @property
    def _model_config_auto_includes(self) -> dict[str, Any]:
        included: dict[str, Any] = super()._model_config_auto_includes
        return included | {
            "model_path": self.model_path,
            "model_dtype": self.model_dtype,
            "compute_dtype": self.compute_dtype,
            "gradient_checkpointing": self.gradient_checkpointing,
            "compile_layers": self.compile_layers,
            "lora": self.lora_settings(),
            "with_reference": self.ref_kl_coeff > 0,
            "with_stale_teacher": self.teacher_sync_iterations is not None,
            "teacher_model": self.teacher_model,
        }


def _text_spaces() -> dict[str, Any]:
    from trial_ray.rollout.env_runner import SPACES

    return SPACES
