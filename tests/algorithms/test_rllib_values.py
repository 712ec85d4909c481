"""Each public setting of RLlib's config works, is refused with its reason, or is harmless and listed as such."""

import pytest
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.core.rl_module import RLModuleSpec
from ray.rllib.utils.metrics.stats import SumStats
from rejections import misconfigured
from small_learners import config_of

from trial_ray import GRPOConfig
from trial_ray.algorithms.rllib_settings import CHECKED_ELSEWHERE, HARMLESS, UNREAD, VALUES, stored_name
from trial_ray.rollout.callbacks import NEVER_CALLED

RLLIB = vars(AlgorithmConfig())
CLASSES = (VALUES.keys() | CHECKED_ELSEWHERE, UNREAD.keys(), HARMLESS.keys())
INTERNAL = {"_fake_gpus", "_is_atari", "_is_frozen", "_is_online", "_per_module_overrides", "_prior_exploration_config",
    "_validate_config", "_use_msgpack_checkpoints", "_tf_policy_handles_more_than_one_loss", "_disable_preprocessor_api",
    "_disable_action_flattening", "_disable_initialize_loss_from_dummy_batch", "_dont_auto_sync_env_runner_states"}  # fmt: skip
"""Attributes that RLlib keeps for itself, whose keywords, if any, are private, too."""
CANDIDATES = [
    "BOGUS", -1, 1.5, float("nan"), True, [3], {"a": -1}, {3: 1}, int, object(), None, 0, 7, 0.5, "auto", "SPREAD",
    "ERROR", {}, {"GPU": 0.5}, len, [len, len], False, [RLlibCallback], {"sum": SumStats}, RLModuleSpec(),
]  # fmt: skip
"""Values of many kinds, of which each setting takes some."""


def config_with(name, value):
    config = config_of("grpo", "anything").evaluation(evaluation_split="generated")
    setattr(config, stored_name(name, RLLIB), value)
    return config


def test_each_setting_is_in_one_class():
    names = {name: stored_name(name, RLLIB) for each in CLASSES for name in each}
    assert sum(map(len, CLASSES)) == len(names)
    of_earlier_versions = {f"callbacks_{hook}" for hook in NEVER_CALLED} - RLLIB.keys()
    assert set(names.values()) - of_earlier_versions == RLLIB.keys() - INTERNAL


@pytest.mark.parametrize("name", VALUES)
def test_a_value_is_accepted_or_refused_with_what_is_expected(name):
    expected, is_valid = VALUES[name]
    assert is_valid(vars(GRPOConfig())[stored_name(name, RLLIB)]), "the default"
    assert 0 < sum(map(is_valid, CANDIDATES)) < len(CANDIDATES)
    for value in CANDIDATES:
        config = config_with(name, value)
        if not is_valid(value):
            misconfigured(f"RLlib's {name} is .*, expected {expected}", config.validate)
        elif name not in ("num_gpus_per_learner", "num_cpus_per_learner", "rl_module_spec", "env_config"):
            config.validate()


@pytest.mark.parametrize("name", sorted(CHECKED_ELSEWHERE))
def test_a_wrong_value_of_another_setting_is_a_config_error(name):
    misconfigured(None, config_with(name, object()).validate)


@pytest.mark.parametrize("name", HARMLESS)
def test_a_harmless_setting_is_accepted(name):
    config_with(name, "anything").validate()


@pytest.mark.parametrize(
    ("name", "value"),
    {"evaluation_interval": -1, "num_cpus_for_main_process": -1, "placement_strategy": "BOGUS", "log_level": "BOGUS",
     "lr": "BOGUS", "merge_env_runner_states": True, "broadcast_env_runner_states": True, "env_config": "BOGUS",
     "callbacks_on_episode_end": 3, "callbacks_class": int}.items(),
)  # fmt: skip
def test_values_that_failed_late_or_never_are_refused(name, value):
    misconfigured(name, config_with(name, value).validate)
