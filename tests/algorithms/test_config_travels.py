"""A method's config keeps its class and settings wherever RLlib and Tune take it: dicts and pickles; tests/e2e has trials."""

from __future__ import annotations

import copy

import pytest
from ray import cloudpickle

from trial_ray.algorithms import GRPO, TRIAL, GRPOConfig, TRIALConfig
from trial_ray.algorithms.methods import method_names, new_config
from trial_ray.config.declare import fields_of
from trial_ray.errors import ConfigError


def changed(method: str) -> GRPOConfig:
    config = new_config(method).environment("trial/ALFWorld-v0", env_config={"split": "generated"})
    return (
        config.rl_module(model_path="anything")
        .training(group_size=5, lr=0.3, teacher_model="another" if method == "opd" else None)
        .evaluation(evaluation_split="generated", evaluation_seed=4)
    )


def assert_same(found: GRPOConfig, expected: GRPOConfig) -> None:
    assert type(found) is type(expected)
    names = [*fields_of(type(expected)), "env", "env_config", "lr", "num_env_runners", "sample_timeout_s"]
    assert {name: vars(found)[name] for name in names} == {name: vars(expected)[name] for name in names}
    found.validate()


@pytest.mark.parametrize("method", method_names())
def test_every_method_survives_dicts_and_pickles(method):
    config = changed(method)
    given = config.to_dict()
    assert_same(GRPO.get_default_config().update_from_dict(copy.deepcopy(given)), config)
    assert_same(config.algo_class.get_default_config().update_from_dict(given), config)
    assert_same(config.algo_class.get_default_config().update_from_dict(config), config)
    assert_same(GRPO.get_default_config().from_state(config.get_state()), config)
    assert_same(type(config).from_dict(config.to_dict()), config)
    assert_same(cloudpickle.loads(cloudpickle.dumps(config)), config)
    assert_same(config.copy(copy_frozen=False), config)
    bundles = config.algo_class.default_resource_request(given).bundles
    assert bundles == GRPO.default_resource_request(config).bundles


def test_trial_and_its_profiles_train_as_trial_and_all_others_as_grpo():
    algorithms = {method: new_config(method).algo_class for method in method_names()}
    assert {method for method, algorithm in algorithms.items() if algorithm is TRIAL} == {
        "trial",
        "uniform",
        "permuted",
    }
    assert set(algorithms.values()) == {GRPO, TRIAL}
    assert type(TRIAL.get_default_config()) is TRIALConfig


def test_an_algorithm_refuses_the_config_of_another():
    with pytest.raises(ConfigError, match=r"Settings of a SDARConfig cannot make a TRIALConfig.*config\.algo_class"):
        TRIAL.get_default_config().update_from_dict(changed("sdar").to_dict())
