"""Learners of the smallest model in this process, without actors."""

from contextlib import contextmanager

import pytest
import torch
from ray.rllib.core import DEFAULT_MODULE_ID

from trial_ray.algorithms.methods import new_config
from trial_ray.prompts.teacher_context import add_teacher_contexts
from trial_ray.rollout.env_runner import SPACES


def build_learner(config):
    learner = config.get_default_learner_class()(
        config=config, module_spec=config.get_multi_rl_module_spec(spaces=SPACES)
    )
    learner.build()
    return learner


def config_of(method, model_path, **settings):
    """A method's config for groups that no engine sampled; policy settings by their names, all others are of training."""
    policy = {name: settings.pop(name) for name in POLICY & settings.keys()}
    config = new_config(method).environment("trial/ALFWorld-v0").rl_module(model_path=model_path, **policy)
    return config.training(**{"max_logprob_diff": 100.0, **settings})


POLICY = {
    "model_dtype", "compute_dtype", "gradient_checkpointing", "lora_rank", "lora_alpha", "lora_targets", "sharding", "fsdp_size",
}  # fmt: skip


def learner_of(method, model_path, **settings):
    return build_learner(config_of(method, model_path, **settings))


def update(learner, groups, iteration=1, **timesteps):
    """Metrics of one update."""
    timesteps = {"training_iteration": iteration, **timesteps}
    for group in groups:
        add_teacher_contexts(group, learner.config, learner.policy_module.tokenizer)
    return learner.update(episodes=list(groups), timesteps=timesteps)[DEFAULT_MODULE_ID]


def trained(learner, groups):
    """Metrics of an update that changes the weights."""
    before = weights(learner)
    metrics = update(learner, groups)
    assert not torch.equal(weights(learner), before)
    return metrics


@contextmanager
def unchanged(learner):
    """Check that the weights stay as they are."""
    before = weights(learner)
    yield
    assert torch.equal(weights(learner), before)


def refuses(learner, groups, error, told, **timesteps):
    """Check that an update raises an error, and leaves the weights as they were."""
    with unchanged(learner), pytest.raises(error, match=told):
        update(learner, groups, **timesteps)


def gradients(learner, groups):
    """Gradients of the first optimizer step by the parameters' names; nothing is applied."""
    names = {id(parameter): name for name, parameter in learner.policy_module.lm.named_parameters()}
    steps = []
    learner.apply_gradients = lambda step: steps.append(
        {names[id(ref)]: gradient.clone() for ref, gradient in step.items()}
    )
    update(learner, groups)
    return steps[0]


def worst(result, expected):
    """Largest difference, relative to the largest entry."""
    scale = max(value.abs().max().item() for value in expected.values())
    return max((result[name] - expected[name]).abs().max().item() for name in expected) / scale


def weights(learner):
    """All weights end to end, a copy."""
    return torch.cat([tensor.reshape(-1) for _, tensor in learner.policy_module.named_weights()]).clone()
