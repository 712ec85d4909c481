"""Settings of RLlib's that nothing here reads: each is refused with what to set in its place, or why there is nothing to set."""

from __future__ import annotations

from typing import Any

from trial_ray.errors import ConfigError
from trial_ray.rollout.callbacks import NEVER_CALLED

_EPISODES = "rollouts are whole episodes, of at most the environment's max_turns"
_ONE_UPDATE = "an iteration is one update of tasks_per_iteration groups"
_TEXTS = "observations and actions are texts"
_NOT_OFFLINE = "training and evaluation play episodes; nothing is read from or written as offline data"
_ONE_POLICY = "one policy is trained"
_SAME_RUNNERS = "the env runners of training play the evaluation set between two iterations"
_STACK = "this package is written for torch and RLlib's new API stack"

UNREAD: dict[str, str] = {
    "minibatch_size": "set minibatch_rows, in turn rows over all learners",
    "shuffle_batch_per_epoch": "set shuffle",
    "train_batch_size": f"{_ONE_UPDATE}; set tasks_per_iteration and group_size",
    "train_batch_size_per_learner": f"{_ONE_UPDATE}; set tasks_per_iteration and group_size",
    "gamma": "returns are not discounted; methods that discount have settings of their own, such as step_discount",
    "model": "set model_path",
    "num_gpus": "set num_gpus_per_learner and num_gpus_per_engine",
    "torch_compile_learner": "set compile_layers",
    "torch_compile_worker": "env runners hold no model; set compile_layers",
    "num_aggregator_actors_per_learner": "learners fetch groups from the env runners",
    "min_time_s_per_iteration": _ONE_UPDATE,
    "min_sample_timesteps_per_iteration": _ONE_UPDATE,
    "min_train_timesteps_per_iteration": _ONE_UPDATE,
    "num_envs_per_env_runner": "set max_episodes_in_flight",
    "rollout_fragment_length": _EPISODES,
    "batch_mode": _EPISODES,
    "explore": "set temperature and evaluation_temperature",
    "exploration_config": "set temperature",
    "observation_space": _TEXTS,
    "action_space": _TEXTS,
    "observation_filter": _TEXTS,
    "normalize_actions": _TEXTS,
    "clip_actions": _TEXTS,
    "compress_observations": _TEXTS,
    "preprocessor_pref": _TEXTS,
    "clip_rewards": "set reward_scale",
    "render_env": "trial-ray inspect shows what was played",
    "restart_failed_sub_environments": "an environment that fails is closed, and its rollout is counted as failed",
    "gym_env_vectorize_mode": "set environment_processes",
    "remote_worker_envs": "set environment_processes",
    "metrics_num_episodes_for_smoothing": "figures are those of one iteration",
    "use_env_runner_state_server": "env runners hold no state that is learned",
    "evaluation_duration": "set evaluation_num_tasks",
    "evaluation_duration_unit": "set evaluation_num_tasks",
    "evaluation_sample_timeout_s": "set sample_timeout_s",
    "evaluation_config": "evaluation has settings of its own, such as evaluation_temperature and evaluation_env_config",
    "evaluation_num_env_runners": _SAME_RUNNERS,
    "evaluation_parallel_to_training": _SAME_RUNNERS,
    "custom_evaluation_function": "evaluation_split chooses the evaluation set, and on_evaluate_end is given its result",
    "policies_to_train": _ONE_POLICY,
    "algorithm_config_overrides_per_module": _ONE_POLICY,
    "input_": _NOT_OFFLINE,
    "output": _NOT_OFFLINE,
    "off_policy_estimation_methods": _NOT_OFFLINE,
    "offline_evaluation_interval": _NOT_OFFLINE,
    "num_offline_eval_runners": _NOT_OFFLINE,
    "framework_str": _STACK,
    "enable_rl_module_and_learner": _STACK,
    "enable_env_runner_and_connector_v2": _STACK,
    **{f"callbacks_{hook}": f"it is never called: {why}" for hook, why in NEVER_CALLED.items()},
}
"""Why nothing reads it, by the setting."""


def refuse_unread(config: Any) -> None:
    """Refuse settings that would have no effect.

    Args:
        config: of the run; RLlib's copy of it for evaluation has settings that RLlib changed.

    Raises:
        ConfigError: names the setting, its value, and what to set.
    """
    if config.in_evaluation:
        return
    own = type(config)()
    for name, why in UNREAD.items():
        # RLlib derives the public one from train_batch_size and num_learners.
        stored = "_train_batch_size_per_learner" if name == "train_batch_size_per_learner" else name
        value = getattr(config, stored, None)
        if value != getattr(own, stored, None):
            raise ConfigError(f"Nothing reads RLlib's {name}, which is {value!r:.100}: {why}.")
