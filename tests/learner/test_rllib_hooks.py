"""Hooks of RLlib's learner and learner connectors are called in an update, or refused before it."""

from __future__ import annotations

import inspect

import pytest
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.connectors.learner import AddObservationsFromEpisodesToBatch
from ray.rllib.core.learner.learner import Learner
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.env.env_runner import EnvRunner
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from small_learners import build_learner, config_of, update
from synthetic_groups import synthetic_groups

from trial_ray.algorithms.rllib_settings import UNCALLED_HOOKS
from trial_ray.errors import CallbackError, ConfigError, UnsupportedError
from trial_ray.learner.learner import GRPOLearner
from trial_ray.rollout.env_runner import SPACES, TextEnvRunner

CALLED_BY_OTHERS = {
    "learner_class": {
        "apply", "distributed", "get_optimizer", "node", "rl_module_required_apis", "_get_global_norm_function",
        "_set_learner_index_and_placement_group",
    },
    "env_runner_cls": {"assert_healthy", "get_spaces", "stop"},
}  # fmt: skip
"""Methods that users, learner groups and ``log_gradients`` call, and methods that RLlib calls on env runners."""


def methods_of(*classes: type) -> set[str]:
    methods = {
        name: getattr(value, "__func__", value.fget if isinstance(value, property) else value)
        for cls in classes
        for name, value in vars(cls).items()
    }
    return {name for name, value in methods.items() if inspect.isfunction(value) and not name.startswith("__")}


def noting(name: str, called: set[str]) -> object:
    """Return an override of a learner's method or property that notes its call."""
    base = inspect.getattr_static(GRPOLearner, name)
    inner = getattr(base, "__func__", base.fget if isinstance(base, property) else base)

    def note(*args, **kwargs):
        called.add(name)
        return inner(*args, **kwargs)

    return type(base)(note) if not inspect.isfunction(base) else note


def test_a_hook_of_rllibs_learner_is_called_or_refused(model_path, tmp_path):
    called: set[str] = set()
    names = methods_of(Learner, TorchLearner)
    noted = type(
        "Noted", (GRPOLearner,), {name: noting(name, called) for name in names - {"add_module", "remove_module"}}
    )
    config = config_of("grpo", model_path, minibatch_rows=16, microbatch_rows=8)
    learner = noted(config=config, module_spec=config.get_multi_rl_module_spec(spaces=SPACES))
    learner.build()
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
    config = config_of("grpo", "anything")
    getattr(config, section)(**{setting: type("Own", (base,), {"extra": 1})}).validate()
    for hook in UNCALLED_HOOKS[setting]:
        getattr(config, section)(**{setting: type("Own", (base,), {hook: lambda self, *args, **kwargs: None})})
        with pytest.raises(ConfigError, match=rf"{setting} is Own, which defines {hook}\(\)"):
            config.validate()


class Shortened(ConnectorV2):
    """Changes the groups in place, as documented."""

    def __call__(self, *, batch, episodes, **kwargs):
        for group in episodes:
            del group.trajectories[2:]
        return batch


class Batched(ConnectorV2):
    def __call__(self, *, batch, episodes, **kwargs):
        return {"default_policy": {"lengths": [len(group) for group in episodes]}}


class Broken(ConnectorV2):
    def __call__(self, *, batch, episodes, **kwargs):
        raise LookupError("no such thing")


def with_connector(model_path, piece):
    config = config_of("grpo", model_path, minibatch_rows=16, microbatch_rows=8)
    return config.learners(learner_connector=lambda observations, actions: [piece()])


def update_with(config):
    update(build_learner(config), groups := synthetic_groups())
    return groups


@pytest.mark.parametrize(
    ("piece", "message"), [(AddObservationsFromEpisodesToBatch, "TrajectoryGroup"), (Batched, "default_policy")]
)
def test_a_connector_of_rllibs_episodes_or_batches_is_refused(piece, message, model_path):
    config = with_connector(model_path, piece)
    with pytest.raises(ConfigError, match=message):
        config.validate()
    with pytest.raises(CallbackError, match=message):
        update_with(config)


def test_settings_that_are_no_connectors_are_refused():
    config = config_of("grpo", "anything")
    for wrong in (3, lambda observations, actions: 3):
        with pytest.raises(ConfigError, match=r"learner_connector is .*, expected a function"):
            config.copy().learners(learner_connector=wrong).validate()
    with pytest.raises(ConfigError, match="add_default_connectors_to_learner_pipeline is True"):
        config.copy().learners(add_default_connectors_to_learner_pipeline=True).validate()


def test_a_connector_changes_the_groups_of_an_update(model_path):
    config = with_connector(model_path, Shortened)
    config.validate()
    assert [len(group.trajectories) for group in update_with(config)] == [2, 2, 2]
    broken = with_connector(model_path, Broken)
    broken.validate()
    with pytest.raises(CallbackError, match="LookupError: no such thing"):
        update_with(broken)


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({}, "neither"),
        ({"training_data": TrainingData(batch={"obs": [1]})}, "neither"),
        ({"episodes": [SingleAgentEpisode()]}, "a SingleAgentEpisode"),
        ({"episodes": synthetic_groups(), "num_epochs": 2}, "num_epochs"),
    ],
)
def test_other_training_data_are_refused(given, kind, model_path):
    learner = build_learner(config_of("grpo", model_path))
    with pytest.raises(UnsupportedError, match=f"but got {kind}"):
        learner.update(**given)
