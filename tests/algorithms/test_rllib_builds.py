"""Specs, modules and learners that RLlib's calls build from a config that only describes its model."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from trial_ray import GRPOConfig
from trial_ray.errors import UnsupportedError
from trial_ray.models.folders import ALFWORLD_TINY, alfworld_tiny


@pytest.fixture(params=[{"model_path": ALFWORLD_TINY}, {"model_path": None, "warm_start": {}}])
def config(request, monkeypatch):
    """A config with a packaged model, or a warm start that results in its folder."""
    monkeypatch.setattr("trial_ray.warmstart.warm_start", lambda *args: SimpleNamespace(path=alfworld_tiny()))
    return GRPOConfig().environment("trial/ALFWorld-v0").rl_module(**request.param)


@pytest.mark.parametrize(
    "build",
    [
        lambda config: config.get_rl_module_spec().build(),
        lambda config: config.get_multi_rl_module_spec().build()["default_policy"],
        lambda config: config.build_learner().policy_module,
        lambda config: config.build_learner_group()._learner.policy_module,
    ],
)
def test_the_model_that_a_config_describes_is_built(build, config):
    state = build(config).get_state()
    stored = load_file(alfworld_tiny() / "model.safetensors")
    assert state.keys() == stored.keys()
    assert all(torch.equal(torch.from_numpy(state[key]), stored[key].float()) for key in stored)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("forward_inference", [{}]), ("forward_exploration", [{}]), ("get_inference_action_dist_cls", [])],
)
def test_actions_of_a_module_are_refused_with_the_ways_to_use_the_policy(name, arguments, model_path):
    module = GRPOConfig().rl_module(model_path=model_path).get_rl_module_spec().build()
    with pytest.raises(UnsupportedError, match=r"trial-ray export .* transformers"):
        getattr(module, name)(*arguments)
