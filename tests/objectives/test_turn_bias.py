"""Turns' advantages have no hidden bias where the policy decides when a rollout ends (verl#7244), by exact enumeration."""

import itertools
import math

import numpy as np
import pytest

from trial_ray import GRPOConfig
from trial_ray.learner.advantages import turn_advantages
from trial_ray.trajectory import Trajectory, TrajectoryGroup, Turn

ROLLOUTS, GO_ON, REWARD = 4, 0.4, 0.3
"""Number of rollouts, probability to take the second turn, and reward of both turns of a rollout that goes on; stopping earns 0."""
TRUE_GRADIENT = GO_ON * (1 - GO_ON) * 2 * REWARD
"""Derivative of the expected return with respect to the logit of ``GO_ON``: 0.144."""
CONFIG = GRPOConfig().training(reward="per_turn", advantage_norm="mean_norm", turn_discount=1.0)


def turn_terms(decisions):
    """Advantage of every first turn as the package computes it."""
    rollouts = [[Turn(reward=REWARD)] * 2 if goes_on else [Turn()] for goes_on in decisions]
    group = TrajectoryGroup("", [Trajectory("", "", 0, turns) for turns in rollouts])
    advantages = turn_advantages([group], CONFIG).tolist()
    return [advantages[place] for place in itertools.accumulate(map(len, rollouts[:-1]), initial=0)]


def sums_of_normalised_rewards(decisions):
    """Rewards minus the mean of their turn's index, added up from the first turn on; the second turns are all equal."""
    return [REWARD * (goes_on - sum(decisions) / ROLLOUTS) for goes_on in decisions]


def expected_gradient(advantages_of):
    """Expected gradient of the surrogate with respect to the logit, over all decisions of the rollouts."""
    total = 0.0
    for decisions in itertools.product((False, True), repeat=ROLLOUTS):
        chance = math.prod(GO_ON if goes_on else 1 - GO_ON for goes_on in decisions)
        total += chance * np.dot(np.subtract(decisions, GO_ON), advantages_of(decisions)) / ROLLOUTS
    return total


def test_turn_advantages_have_the_gradient_of_the_return():
    assert expected_gradient(turn_terms) == pytest.approx(3 / 4 * TRUE_GRADIENT, abs=1e-12)
    assert expected_gradient(sums_of_normalised_rewards) == pytest.approx(0.054)
