"""Learners of the smallest model in this process, without actors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ray.rllib.core import DEFAULT_MODULE_ID

from trial_ray.algorithms import GRPOConfig
from trial_ray.algorithms.methods import new_config
from trial_ray.learner.learner import GRPOLearner
from trial_ray.prompts.teacher_context import add_teacher_contexts
from trial_ray.rollout.env_runner import SPACES


def build_learner(config: GRPOConfig) -> GRPOLearner:
    learner = config.get_default_learner_class()(
        config=config, module_spec=config.get_multi_rl_module_spec(spaces=SPACES)
    )
    learner.build()
    return learner


def config_of(method: str, model_path: str, **settings: Any) -> GRPOConfig:
    """A method's config for groups that no engine sampled; policy settings by their names, all others are of training."""
    policy = {name: settings.pop(name) for name in POLICY & settings.keys()}
    config = new_config(method).environment("trial/ALFWorld-v0").rl_module(model_path=model_path, **policy)
    return config.training(**{"max_logprob_diff": 100.0, **settings})


POLICY = {
    "model_dtype", "compute_dtype", "gradient_checkpointing", "lora_rank", "lora_alpha", "lora_targets", "sharding", "fsdp_size",
}  # fmt: skip


def learner_of(method: str, model_path: str, **settings: Any) -> GRPOLearner:
    return build_learner(config_of(method, model_path, **settings))


def update(learner: GRPOLearner, groups, iteration: int = 1, **timesteps: int) -> dict:
    """Metrics of one update."""
    timesteps = {"training_iteration": iteration, **timesteps}
    for group in groups:
        add_teacher_contexts(group, learner.config, learner.policy_module.tokenizer)
    return learner.update(episodes=list(groups), timesteps=timesteps)[DEFAULT_MODULE_ID]


def trained(learner: GRPOLearner, groups, iteration: int = 1) -> dict:
    """Metrics of an update that changes the weights."""
    before = weights(learner)
    metrics = update(learner, groups, iteration)
    assert not torch.equal(weights(learner), before)
    return metrics


def refuses(learner: GRPOLearner, groups, error: type[Exception], told: str, **timesteps: int) -> None:
    """Check that an update raises an error, and leaves the weights as they were."""
    before = weights(learner)
    with pytest.raises(error, match=told):
        update(learner, groups, **timesteps)
    assert torch.equal(weights(learner), before)


def gradients(learner: GRPOLearner, groups, iteration: int = 1) -> dict[str, torch.Tensor]:
    """Gradients of the first optimizer step by the parameters' names; nothing is applied."""
    names = {id(parameter): name for name, parameter in learner.policy_module.lm.named_parameters()}
    steps = []
    learner.apply_gradients = lambda step: steps.append(
        {names[id(ref)]: gradient.clone() for ref, gradient in step.items()}
    )
    update(learner, groups, iteration)
    return steps[0]


def worst(result: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Largest difference, relative to the largest entry."""
    scale = max(value.abs().max().item() for value in expected.values())
    return max((result[name] - expected[name]).abs().max().item() for name in expected) / scale


def weights(learner: GRPOLearner) -> torch.Tensor:
    """All weights end to end, a copy."""
    return torch.cat([tensor.reshape(-1) for _, tensor in learner.policy_module.named_weights()]).clone()
