"""Requests to play groups of rollouts, summaries of played groups, and sums over rollouts for metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import add
from typing import Any

import numpy as np
from ray import ObjectRef
from ray.rllib.utils.metrics import (
    EPISODE_LEN_MAX,
    EPISODE_LEN_MEAN,
    EPISODE_LEN_MIN,
    EPISODE_RETURN_MAX,
    EPISODE_RETURN_MEAN,
    EPISODE_RETURN_MIN,
    NUM_ENV_STEPS_SAMPLED,
    NUM_EPISODES,
)

from trial_ray.config.run import RunSettings
from trial_ray.engines.protocol import SamplingParams
from trial_ray.errors import EnvironmentFaultError, InfrastructureError, TrainingDivergedError
from trial_ray.files import Json, Numbers
from trial_ray.models.prefix_tree import common_prefix
from trial_ray.trajectory import EpisodeResult, Trajectory, TrajectoryGroup

NamedReward = tuple[float, int]
"""Sum of a named reward, and the number of rollouts that have it."""
_MERGED: dict[str, Callable[[Any, Any], Any]] = {"_min": min, "_max": max}
"""Functions that merge two values of a :class:`RolloutCounts` field, by the end of the field's name; other fields are added."""


@dataclass(frozen=True)
class RolloutCounts:
    """Sums over rollouts that were played to their end, and the number of failed rollouts.

    Attributes:
        episodes: rollouts played to their end.
        failed: rollouts that failed because of an engine or the environment; of the other sums, only ``refused_calls`` and
            ``cancelled_calls`` include failed rollouts.
        turns: turns taken.
        prompt_tokens: prompt tokens of all turns.
        response_tokens: response tokens of all turns.
        reasoning_tokens: response tokens that are reasoning.
        returns: sum of the rollouts' undiscounted returns.
        successes: rollouts that solved their task.
        scores: sum of the environment's scores.
        truncated: rollouts that were truncated by the environment or by a limit on turns or prompt tokens.
        invalid_responses: turns with a response that did not have the required format.
        invalid_actions: turns with an action that the environment did not understand.
        cut_responses: turns with a response that reached the token limit.
        cut_histories: turns with earlier turns dropped from the prompt.
        cut_observations: turns with a part of the observation dropped from the prompt.
        branches: chat requests of an agent program (which calls the policy through a chat API) that do not continue an earlier
            request and its answer.
        refused_calls: chat requests of a program that were refused, also in failed rollouts.
        cancelled_calls: chat requests that a program gave up, also in failed rollouts.
        taken_tokens: prompt tokens, over all chat requests of programs, that repeat the ids of an earlier request and its answer.
        called_tokens: prompt tokens of all chat requests of programs.
        rewards: sum of each named reward, and the number of rollouts that have it.
        return_min, return_max, length_min, length_max: extremes over the rollouts, lengths in turns; infinite without rollouts.
    """

    episodes: int = 0
    failed: int = 0
    turns: int = 0
    prompt_tokens: int = 0
    response_tokens: int = 0
    reasoning_tokens: int = 0
    returns: float = 0.0
    successes: int = 0
    scores: float = 0.0
    truncated: int = 0
    invalid_responses: int = 0
    invalid_actions: int = 0
    cut_responses: int = 0
    cut_histories: int = 0
    cut_observations: int = 0
    branches: int = 0
    refused_calls: int = 0
    cancelled_calls: int = 0
    taken_tokens: int = 0
    called_tokens: int = 0
    rewards: Mapping[str, NamedReward] = field(default_factory=dict)
    return_min: float = math.inf
    return_max: float = -math.inf
    length_min: float = math.inf
    length_max: float = -math.inf

    @classmethod
    def of(cls, trajectories: Iterable[Trajectory]) -> RolloutCounts:
        """Return the sums over ``trajectories``, each of which is one rollout."""
        rollouts = list(trajectories)
        played = [rollout for rollout in rollouts if not rollout.failed]
        turns = [turn for rollout in played for turn in rollout.turns]
        returns, lengths = [rollout.episode_return for rollout in played], [len(rollout.turns) for rollout in played]
        return cls(
            episodes=len(played),
            failed=len(rollouts) - len(played),
            turns=len(turns),
            prompt_tokens=sum(len(turn.prompt_ids) for turn in turns),
            response_tokens=sum(len(turn.response_ids) for turn in turns),
            reasoning_tokens=sum(turn.reasoning_tokens for turn in turns),
            returns=sum(returns),
            successes=sum(bool(rollout.success) for rollout in played),
            scores=sum(float(rollout.score) for rollout in played),
            truncated=sum(rollout.ended != "terminated" for rollout in played),
            invalid_responses=sum(not turn.valid for turn in turns),
            invalid_actions=sum(bool(turn.invalid_action) for turn in turns),
            cut_responses=sum(turn.finish_reason == "length" for turn in turns),
            cut_histories=sum(turn.prompt_cut != "none" for turn in turns),
            cut_observations=sum(turn.prompt_cut == "observation" for turn in turns),
            branches=sum(turn.call is not None and not turn.call.answered for turn in turns),
            refused_calls=sum(rollout.calls.get("refused", 0) for rollout in rollouts),
            cancelled_calls=sum(rollout.calls.get("cancelled", 0) for rollout in rollouts),
            taken_tokens=sum(map(_taken_tokens, played)),
            called_tokens=sum(len(turn.prompt_ids) for turn in turns if turn.call is not None),
            rewards=_merged_rewards(
                {name: (value, 1)} for rollout in played for name, value in rollout.rewards.items()
            ),
            return_min=min(returns, default=math.inf),
            return_max=max(returns, default=-math.inf),
            length_min=min(lengths, default=math.inf),
            length_max=max(lengths, default=-math.inf),
        )

    def __add__(self, other: RolloutCounts) -> RolloutCounts:
        numbers = {
            count.name: _MERGED.get(count.name[-4:], add)(getattr(self, count.name), getattr(other, count.name))
            for count in fields(self)
            if count.name != "rewards"
        }
        return RolloutCounts(**numbers, rewards=_merged_rewards((self.rewards, other.rewards)))

    def episode_metrics(self) -> Numbers:
        """Return the metrics of whole episodes, by their names under ``env_runners/``; without episodes, only their number."""
        counts: Numbers = {NUM_EPISODES: self.episodes}
        if not self.episodes:
            return counts
        return counts | {
            "success_rate": self.successes / self.episodes,
            "score_mean": self.scores / self.episodes,
            EPISODE_RETURN_MEAN: self.returns / self.episodes,
            EPISODE_RETURN_MIN: self.return_min,
            EPISODE_RETURN_MAX: self.return_max,
            EPISODE_LEN_MEAN: self.turns / self.episodes,
            EPISODE_LEN_MIN: self.length_min,
            EPISODE_LEN_MAX: self.length_max,
            "truncated_rate": self.truncated / self.episodes,
            **{f"rewards/{name}_mean": total / rollouts for name, (total, rollouts) in self.rewards.items()},
        }

    def evaluation_metrics(self) -> Numbers:
        """Return the metrics of an evaluation set, by their names under ``evaluation/env_runners/``."""
        return {**self.episode_metrics(), NUM_ENV_STEPS_SAMPLED: self.turns}

    def metrics(self) -> Numbers:
        """Return all metrics, by their names under ``env_runners/``; a rate is omitted if its denominator is 0."""
        counts: Numbers = {
            "num_failed_episodes": self.failed,
            NUM_ENV_STEPS_SAMPLED: self.turns,
            "num_prompt_tokens": self.prompt_tokens,
            "num_response_tokens": self.response_tokens,
            "num_reasoning_tokens": self.reasoning_tokens,
            **self.episode_metrics(),
        }
        if self.called_tokens or self.refused_calls or self.cancelled_calls:
            counts |= {
                "num_branches": self.branches,
                "num_refused_calls": self.refused_calls,
                "num_cancelled_calls": self.cancelled_calls,
            }
        if not self.turns:
            return counts
        if self.called_tokens:
            counts["taken_prompt_rate"] = self.taken_tokens / self.called_tokens
        return counts | {
            "invalid_response_rate": self.invalid_responses / self.turns,
            "invalid_action_rate": self.invalid_actions / self.turns,
            "cut_response_rate": self.cut_responses / self.turns,
            "cut_history_rate": self.cut_histories / self.turns,
            "cut_observation_rate": self.cut_observations / self.turns,
        }


def _taken_tokens(trajectory: Trajectory) -> int:
    """Return the number of prompt tokens in an agent program's chat requests that repeat an earlier request and its answer."""
    taken = 0
    for turn in trajectory.turns:
        if turn.call is not None and turn.call.parent is not None:
            parent = trajectory.turns[turn.call.parent]
            ids = np.concatenate([parent.prompt_ids, parent.response_ids])
            taken += common_prefix(ids, turn.prompt_ids)
    return taken


def _merged_rewards(parts: Iterable[Mapping[str, NamedReward]]) -> dict[str, NamedReward]:
    merged: dict[str, NamedReward] = {}
    for part in parts:
        for name, (value, count) in part.items():
            total, number = merged.get(name, (0.0, 0))
            merged[name] = (total + value, number + count)
    return merged


@dataclass(frozen=True)
class GroupRequest:
    """Request to play ``group_size`` rollouts of one task.

    Attributes:
        index: index of the group in the run, or in the evaluation set; env runners start groups with lower indices earlier.
        task_id: the task.
        group_size: number of rollouts.
        seed: seed of the environment and of sampling for the whole group.
        environment: index of the task's environment in the run.
    """

    index: int
    task_id: str
    group_size: int
    seed: int
    environment: int = 0


@dataclass(frozen=True)
class SampleSettings:
    """Settings of the rollouts of several group requests.

    Attributes:
        env_configs: keyword arguments of each of the run's environments.
        params: sampling parameters of responses.
        seeded: whether every response has a seed derived from the group's seed.
        in_evaluation: whether the tasks belong to an evaluation set.
        recorded: whether env runners record completed groups under iteration 0; only for evaluation sets.
    """

    env_configs: tuple[Json, ...]
    params: SamplingParams
    seeded: bool = False
    in_evaluation: bool = False
    recorded: bool = False


@dataclass(frozen=True)
class GroupSample:
    """Summary of a played group.

    Attributes:
        request: the request that was played.
        group: reference to the group in the object store; ``None`` if it is not trained on. The driver owns the object, which
            therefore outlives the env runner that played it.
        episodes: result of every rollout, failed rollouts included.
        errors: errors of the failed rollouts.
        num_completed: number of completed rollouts, which can be trained on.
        num_rows: number of turns of the completed rollouts.
        zero_variance: whether the method's advantages of all turns are 0, so that the surrogate loss has no gradient.
        counts: sums over all rollouts of the group, for the metrics.
        too_long: error message if the first prompt of a rollout exceeds the token limit, so that playing the task again would
            not help; else ``None``.
        weight_versions: oldest and newest version of the weights that sampled the completed rollouts' turns; (0, 0) without
            turns.
        num_environment_faults: number of rollouts that failed because of their environment.
        starts_differ: whether the completed rollouts begin with different observations or prompts, despite equal task and seed.
        runner: id of the env runner that played the group, as in ``EnvRunnerPool``.
        logged: metrics that callbacks on the env runner have logged, for any group, since the env runner's previous sample; metrics
            of training and of evaluation are separate.
    """

    request: GroupRequest
    group: ObjectRef[TrajectoryGroup] | None
    episodes: list[EpisodeResult]
    errors: list[str]
    num_completed: int
    num_rows: int
    zero_variance: bool
    counts: RolloutCounts
    weight_versions: tuple[int, int] = (0, 0)
    num_environment_faults: int = 0
    too_long: str | None = None
    starts_differ: bool = False
    runner: int = 0
    logged: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_group(cls, request: GroupRequest, group: TrajectoryGroup, config: RunSettings) -> GroupSample:
        """Summarize a played group, without a reference to the group and without logged metrics."""
        completed = group.completed
        versions = [turn.weight_version for trajectory in completed for turn in trajectory.turns] or [0]
        return cls(
            request=request,
            group=None,
            episodes=[EpisodeResult.from_trajectory(trajectory) for trajectory in group.trajectories],
            errors=[trajectory.error or "" for trajectory in group.trajectories if trajectory.failed],
            num_completed=len(completed),
            num_rows=sum(len(trajectory.turns) for trajectory in completed),
            zero_variance=_is_without_advantage(group, config),
            counts=RolloutCounts.of(group.trajectories),
            weight_versions=(min(versions), max(versions)),
            num_environment_faults=sum(trajectory.failed_by == "environment" for trajectory in group.trajectories),
            too_long=next(
                (
                    rollout.error
                    for rollout in group.trajectories
                    if rollout.ended == "prompt_limit" and not rollout.turns
                ),
                None,
            ),
            starts_differ=group.starts_differ,
        )


def _is_without_advantage(group: TrajectoryGroup, config: RunSettings) -> bool:
    try:
        return not config.method_class(config).advantages([group]).any()
    except TrainingDivergedError:  # A reward is not finite: the learner raises this error if it trains on the group.
        return False


def failure_of(message: str, samples: Sequence[GroupSample], losses: Sequence[str]) -> InfrastructureError:
    """Return the error for groups that could not be played: an :class:`EnvironmentFaultError` if only environments failed.

    A run is not restarted after an :class:`EnvironmentFaultError`, because the environments would fail again.

    Args:
        message: start of the error's message, which names the groups that could not be played.
        samples: samples of the groups from the last attempt.
        losses: reasons for the loss of env runners.
    """
    errors = [error for sample in samples for error in sample.errors]
    faults = sum(sample.num_environment_faults for sample in samples)
    kind = EnvironmentFaultError if errors and not losses and faults == len(errors) else InfrastructureError
    causes = [*errors, *losses, *(sample.too_long for sample in samples if sample.too_long is not None)]
    return kind(
        message + (f"; the first error was: {causes[0]}" if causes else ": no env runner was left to play them.")
    )
