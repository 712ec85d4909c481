"""Hooks of RLlib's learner and learner connectors are called in an update, or refused before it."""

import inspect
from contextlib import nullcontext

import pytest
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.connectors.learner import AddObservationsFromEpisodesToBatch
from ray.rllib.core.learner import Learner
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.env.env_runner import EnvRunner
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from rejections import misconfigured
from small_learners import build_learner, config_of, update
from synthetic_groups import synthetic_groups

from trial_ray.algorithms.rllib_settings import UNCALLED_HOOKS
from trial_ray.errors import CallbackError, ConfigError, UnsupportedError
from trial_ray.learner.learner import GRPOLearner
from trial_ray.rollout.env_runner import TextEnvRunner

CALLED_BY_OTHERS = {
    "learner_class": {
        "apply", "distributed", "get_optimizer", "node", "rl_module_required_apis", "_get_global_norm_function",
        "_set_learner_index_and_placement_group",
    },
    "env_runner_cls": {"assert_healthy", "get_spaces", "stop"},
}  # fmt: skip
"""Methods that users, learner groups and ``log_gradients`` call, and methods that RLlib calls on env runners."""


def function_of(attribute):
    """Return the function of a method or property."""
    return getattr(attribute, "__func__", attribute.fget if isinstance(attribute, property) else attribute)


def methods_of(*classes):
    return {
        name
        for cls in classes
        for name, value in vars(cls).items()
        if not name.startswith("__") and inspect.isfunction(function_of(value))
    }


def noting(name, called):
    """Return an override of a learner's method or property that notes its call."""
    base = inspect.getattr_static(GRPOLearner, name)
    inner = function_of(base)

    def note(*args, **kwargs):
        called.add(name)
        return inner(*args, **kwargs)

    return note if inner is base else type(base)(note)


def test_a_hook_of_rllibs_learner_is_called_or_refused(model_path, tmp_path):
    called = set()
    names = methods_of(Learner, TorchLearner)
    overrides = {name: noting(name, called) for name in names - {"add_module", "remove_module"}}
    config = config_of("grpo", model_path)
    learner = config.training(learner_class=type("Noted", (GRPOLearner,), overrides)).build_learner()
    update(learner, synthetic_groups())
    learner.save_to_path(tmp_path / "saved")
    learner.restore_from_path(tmp_path / "saved")
    learner.set_state(learner.get_state())
    learner.shutdown()
    refused = UNCALLED_HOOKS["learner_class"].keys()
    assert called & refused == set()
    assert names - called - refused == CALLED_BY_OTHERS["learner_class"]


def test_every_method_of_rllibs_env_runner_is_called_or_refused():
    refused = UNCALLED_HOOKS["env_runner_cls"].keys()
    assert methods_of(EnvRunner) == refused | CALLED_BY_OTHERS["env_runner_cls"]


@pytest.mark.parametrize(
    ("section", "setting", "base"),
    [("training", "learner_class", GRPOLearner), ("env_runners", "env_runner_cls", TextEnvRunner)],
)
def test_a_class_with_a_hook_that_nothing_calls_is_refused(section, setting, base):
    def validate(**members):
        own = {setting: type("Own", (base,), members)}
        getattr(config_of("grpo", "anything"), section)(**own).validate()

    validate(extra=1)
    for hook in UNCALLED_HOOKS[setting]:
        words = rf"{setting} is Own, which defines {hook}\(\)"
        misconfigured(words, validate, **{hook: lambda self, *args, **kwargs: None})


class Shortened(ConnectorV2):
    """Changes the groups in place, as documented."""

    def __call__(self, *, episodes, **others):
        for group in episodes:
            del group.trajectories[2:]
        return others["batch"]


class Batched(ConnectorV2):
    def __call__(self, *, episodes, **others):
        return {"default_policy": {"lengths": [*map(len, episodes)]}}


class Broken(ConnectorV2):
    def __call__(self, **others):
        raise LookupError("no such thing")


def with_connector(model_path, piece):
    config = config_of("grpo", model_path)
    return config.learners(learner_connector=lambda observations, actions: [piece()])


def update_with(config):
    update(build_learner(config), groups := synthetic_groups())
    return groups


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        (AddObservationsFromEpisodesToBatch, "TrajectoryGroup"),
        (Batched, "default_policy"),
        (Broken, "LookupError: no such thing"),
    ],
)
def test_a_connector_that_reads_episodes_or_fails_is_refused(piece, message, model_path):
    """An error of another kind may be one of the groups, and is raised in the update alone."""
    config = with_connector(model_path, piece)
    with nullcontext() if piece is Broken else pytest.raises(ConfigError, match=message):
        config.validate()
    with pytest.raises(CallbackError, match=message):
        update_with(config)


def test_settings_that_are_no_connectors_are_refused():
    config = config_of("grpo", "anything")
    for wrong in (3, lambda observations, actions: 3):
        changed = config.copy().learners(learner_connector=wrong)
        misconfigured(r"learner_connector is .*, expected a function", changed.validate)
    changed = config.copy().learners(add_default_connectors_to_learner_pipeline=True)
    misconfigured("add_default_connectors_to_learner_pipeline is True", changed.validate)


def test_a_connector_changes_the_groups_of_an_update(model_path):
    config = with_connector(model_path, Shortened)
    config.validate()
    assert [len(group.trajectories) for group in update_with(config)] == [2, 2, 2]


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({"training_data": TrainingData(batch={"obs": [1]})}, "neither"),
        ({"episodes": [SingleAgentEpisode()]}, "a SingleAgentEpisode"),
        ({"episodes": synthetic_groups(), "num_epochs": 2}, "num_epochs"),
    ],
)
def test_other_training_data_are_refused(given, kind, model_path):
    learner = build_learner(config_of("grpo", model_path))
    with pytest.raises(UnsupportedError, match=f"but got {kind}"):
        learner.update(**given)
