"""A method's config keeps its class and settings wherever RLlib and Tune take it: dicts and pickles; tests/e2e has trials."""

import copy

import pytest
from ray import cloudpickle
from rejections import misconfigured

from trial_ray import GRPO, TRIAL, TRIALConfig
from trial_ray.algorithms.methods import method_names, new_config
from trial_ray.config.declare import fields_of


def changed(method):
    config = new_config(method).environment("trial/ALFWorld-v0", env_config={"split": "generated"})
    return (
        config.rl_module(model_path="anything")
        .training(group_size=5, lr=0.3, teacher_model="another" if method == "opd" else None)
        .evaluation(evaluation_split="generated", evaluation_seed=4)
    )


@pytest.mark.parametrize("method", method_names())
def test_every_method_survives_dicts_and_pickles(method):
    config = changed(method)
    given, default = config.to_dict(), config.algo_class.get_default_config
    names = [*fields_of(type(config)), "env", "env_config", "lr", "num_env_runners", "sample_timeout_s"]
    for found in (
        GRPO.get_default_config().update_from_dict(copy.deepcopy(given)),
        default().update_from_dict(given),
        default().update_from_dict(config),
        GRPO.get_default_config().from_state(config.get_state()),
        type(config).from_dict(config.to_dict()),
        cloudpickle.loads(cloudpickle.dumps(config)),
        config.copy(copy_frozen=False),
    ):
        assert type(found) is type(config)
        assert [vars(found)[name] for name in names] == [vars(config)[name] for name in names]
        found.validate()
    bundles = config.algo_class.default_resource_request(given).bundles
    assert bundles == GRPO.default_resource_request(config).bundles


def test_trial_and_its_profiles_train_as_trial_and_all_others_as_grpo():
    of_trial = {"trial", "uniform", "permuted"}
    assert of_trial < {*method_names()}
    for method in method_names():
        assert new_config(method).algo_class is (TRIAL if method in of_trial else GRPO), method
    assert type(TRIAL.get_default_config()) is TRIALConfig


def test_an_algorithm_refuses_the_config_of_another():
    words = r"Settings of a SDARConfig cannot make a TRIALConfig.*config\.algo_class"
    misconfigured(words, TRIAL.get_default_config().update_from_dict, changed("sdar").to_dict())
