"""Learners of the smallest model in this process, without actors: built, updated, looked at."""

from __future__ import annotations

import torch
from ray.rllib.core import DEFAULT_MODULE_ID

from trial_ray.algorithms import GRPOConfig
from trial_ray.learner.learner import GRPOLearner
from trial_ray.rollout.env_runner import SPACES


def build_learner(config: GRPOConfig) -> GRPOLearner:
    learner = config.get_default_learner_class()(
        config=config, module_spec=config.get_multi_rl_module_spec(spaces=SPACES)
    )
    learner.build()
    return learner


def update(learner: GRPOLearner, groups, iteration: int = 1) -> dict:
    """Metrics of one update."""
    return learner.update(episodes=list(groups), timesteps={"training_iteration": iteration})[DEFAULT_MODULE_ID]


def weights(learner: GRPOLearner) -> torch.Tensor:
    """All weights end to end, a copy."""
    return torch.cat([tensor.reshape(-1) for _, tensor in learner.policy_module.named_weights()]).clone()
