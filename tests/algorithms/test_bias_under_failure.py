"""What is estimated and trained where rollouts fail: the values that docs/reliability.md derives, in its notation.

A synthetic environment wins with probability p, in other numbers of steps than it loses, and fails by a rule. Its episodes are
played by the episode loop; groups, redraws, success rates and advantages are those of training.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from dataclasses import dataclass
from typing import Any, ClassVar

import gymnasium
import pytest
from gymnasium.spaces import Text
from user_env import entry_of

from trial_ray.algorithms import GRPOConfig
from trial_ray.algorithms.sampling import MIN_SURVIVORS, BatchSampler, SampledBatch, TaskSampler
from trial_ray.environments.guarded import GuardedEnv
from trial_ray.learner.connectors import group_turn_rows
from trial_ray.rollout.episode import Decision, play_episode
from trial_ray.rollout.groups import GroupSample
from trial_ray.rollout.trajectory import TrajectoryGroup

G, REDRAWS, GROUPS = 4, 2, 300
SIGMAS = 4.0
"""Tolerance, in standard errors of what is estimated."""


@dataclass(frozen=True)
class Law:
    """How episodes of a task end and fail.

    Attributes:
        p: probability of success, without failures.
        steps: L_0 and L_1, steps of an episode that loses or wins.
        step_failure: ε, probability that a step fails.
        end_failure: probability that the last step fails, of an episode that loses or wins.
    """

    p: float
    steps: tuple[int, int]
    step_failure: float = 0.0
    end_failure: tuple[float, float] = (0.0, 0.0)

    @property
    def survival(self) -> tuple[float, float]:
        """s_0 and s_1: probabilities that an episode that loses or wins survives."""
        lost, won = (
            (1 - self.step_failure) ** steps * (1 - end)
            for steps, end in zip(self.steps, self.end_failure, strict=True)
        )
        return lost, won

    @property
    def surviving(self) -> float:
        """Z: probability that an episode survives."""
        lost, won = self.survival
        return self.p * won + (1 - self.p) * lost

    @property
    def success(self) -> float:
        """q: probability of success, given survival."""
        return self.p * self.survival[1] / self.surviving

    def survivors(self, number: int) -> float:
        """Probability of this many survivors in a group."""
        return math.comb(G, number) * self.surviving**number * (1 - self.surviving) ** (G - number)

    @property
    def kept(self) -> float:
        """Probability that a group is trained, after its redraws."""
        lost = sum(self.survivors(number) for number in range(MIN_SURVIVORS))
        return 1 - lost ** (1 + REDRAWS)

    @property
    def covariance(self) -> float:
        """Mean over trained groups of the sum of A_i R_i over the survivors, by their number."""
        q, total, enough = self.success, 0.0, 0.0
        for k in range(MIN_SURVIVORS, G + 1):
            enough += self.survivors(k)
            for m in range(k + 1):
                chance = math.comb(k, m) * q**m * (1 - q) ** (k - m)
                total += self.survivors(k) * chance * math.sqrt(m * (k - m) * (k - 1) / k)
        return total / enough


LAWS = {
    "10 % of steps, outcomes alike": Law(0.4, (3, 3), 0.1),
    "30 % of steps, outcomes alike": Law(0.4, (3, 3), 0.3),
    "10 % of steps, losses are longer": Law(0.4, (6, 2), 0.1),
    "30 % of steps, losses are longer": Law(0.4, (6, 2), 0.3),
    "30 % of steps, wins are longer": Law(0.7, (1, 4), 0.3),
    "half of the wins": Law(0.6, (2, 2), 0.0, (0.0, 0.5)),
}


class SyntheticEnv(gymnasium.Env):
    """Wins or loses by a law, and raises where it says so."""

    ENV_ID: ClassVar[str] = "mine/Synthetic-v0"
    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}
    law: ClassVar[Law]
    random: ClassVar[random.Random]

    def __init__(self) -> None:
        self.observation_space = self.action_space = Text(10)

    def tasks(self, split=None):
        return ["task"]

    def reset(self, *, seed=None, options=None):
        self.wins = self.random.random() < self.law.p
        self.left = self.law.steps[self.wins]
        return "", {}

    def step(self, action):
        self.left -= 1
        ends = self.left == 0
        if self.random.random() < self.law.step_failure or (
            ends and self.random.random() < self.law.end_failure[self.wins]
        ):
            raise ConnectionError("gone")
        won = ends and self.wins
        return "", float(won), ends, False, {"won": won}


class Acts:
    """Takes a turn."""

    async def act(self, result, history, step):
        return Decision("go")


class Workers:
    """Plays requests like an env runner, one rollout after the other, with a player that needs no engine."""

    def __init__(self) -> None:
        self.groups: dict[tuple[int, int], TrajectoryGroup] = {}
        self.free: list[GuardedEnv] = []

    def sample_groups(self, requests, settings):
        return [asyncio.run(self._play(request)) for request in requests]

    async def _play(self, request) -> GroupSample:
        trajectories = []
        for rollout in range(request.group_size):
            env = self.free.pop() if self.free else GuardedEnv(entry_of(SyntheticEnv))
            trajectories.append(await play_episode(env, request.task_id, Acts(), seed=rollout))
            if not env.faulty:
                self.free.append(env)
        group = TrajectoryGroup(request.task_id, trajectories)
        self.groups[request.index, request.seed] = group
        return GroupSample.from_group(request, group, None, "success", 0.0)

    def repair(self, again: int) -> None:
        """Nothing to repair."""

    def take_losses(self) -> list[str]:
        return []


def trained(law: Law) -> tuple[list[TrajectoryGroup], SampledBatch, Workers]:
    """The groups that one iteration trains on, out of :data:`GROUPS`."""
    SyntheticEnv.law, SyntheticEnv.random = law, random.Random(1)
    logging.getLogger("trial_ray.environments").setLevel(logging.CRITICAL)
    config = GRPOConfig().environment("trial/ALFWorld-v0").env_runners(max_group_redraws=REDRAWS)
    config.training(group_size=G, tasks_per_iteration=GROUPS)
    workers = Workers()
    batch = BatchSampler(config, TaskSampler([["task"]], seed=0), workers).sample(1)
    logging.getLogger("trial_ray.environments").setLevel(logging.NOTSET)
    return [workers.groups[each.request.index, each.request.seed] for each in batch.kept], batch, workers


def near(found: float, expected: float, error: float) -> bool:
    """Whether an estimate is within its standard error, times :data:`SIGMAS`."""
    print(f"{found:.4f} found, {expected:.4f} derived, standard error {error:.4f}")
    return abs(found - expected) <= SIGMAS * error


def share(found: int, number: int, expected: float) -> bool:
    return near(found / number, expected, math.sqrt(expected * (1 - expected) / number))


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_estimates_are_those_of_episodes_given_that_they_survive(law):
    groups, batch, workers = trained(law)
    survivors = [trajectory for group in groups for trajectory in group.survivors]
    played = [trajectory for group in workers.groups.values() for trajectory in group.trajectories]
    assert share(sum(each.survived for each in played), len(played), law.surviving)
    assert share(sum(each.success for each in survivors), len(survivors), law.success)
    # A group's own mean does not depend on how many survive it, so groups can weigh the same.
    means = [sum(each.success for each in group.survivors) / len(group.survivors) for group in groups]
    assert near(sum(means) / len(means), law.success, math.sqrt(law.success * (1 - law.success) / (2 * len(means))))
    assert share(len(groups), GROUPS, law.kept)
    assert len(batch.left_out) == GROUPS - len(groups)
    rows = group_turn_rows(groups, GRPOConfig().training(reward="success", reward_scale=1.0))
    first = dict(zip(reversed(rows.trajectory_ids.tolist()), reversed(rows.advantages.tolist()), strict=True))
    gained = sum(first[index] for index, each in enumerate(survivors) if each.success)
    assert near(gained / len(groups), law.covariance, 0.5 * math.sqrt(G) / math.sqrt(len(groups)))
    assert abs(sum(first.values())) < 1e-6
