"""Advantages of the turns of an update, from rewards, penalties and groups (TRIAL paper, Eq. 1)."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from trial_ray.config.run import RunSettings
from trial_ray.config.training import Reward, reward_name
from trial_ray.errors import TrainingDivergedError
from trial_ray.objectives.advantages import discounted_returns, group_relative_advantages, penalised_advantages
from trial_ray.trajectory import Trajectory, TrajectoryGroup, Turn


def trajectory_ids_of(trajectories: Sequence[Trajectory]) -> Tensor:
    """Return, for each of the K turns of ``trajectories``, the index of its trajectory in this sequence, int64 ``[K]``."""
    lengths = torch.tensor([len(trajectory.turns) for trajectory in trajectories], dtype=torch.int64)
    return torch.repeat_interleave(torch.arange(len(trajectories)), lengths)


def group_advantages(groups: Sequence[TrajectoryGroup], config: RunSettings) -> Tensor:
    """Return the advantage of each turn of all completed rollouts, float64 ``[K]``.

    By default, it is the advantage of the turn's rollout minus the penalty of :func:`form_penalties`. ``reward="per_turn"``
    adds :func:`turn_advantages`; with ``advantage_statistics="rows"``, returns are normalised over turns instead of rollouts.

    Raises:
        TrainingDivergedError: a reward is not finite.
    """
    completed = [(index, trajectory) for index, group in enumerate(groups) for trajectory in group.completed]
    trajectory_ids = trajectory_ids_of([trajectory for _, trajectory in completed])
    group_ids = torch.tensor([index for index, _ in completed], dtype=torch.int64)
    rewards = [config.reward_scale * trajectory.outcome_reward(config.reward) for _, trajectory in completed]
    returns = torch.tensor(rewards, dtype=torch.float64)
    for (_, trajectory), reward in zip(completed, rewards, strict=True):
        if not math.isfinite(reward):
            raise TrainingDivergedError(
                f"A rollout of task {trajectory.task_id!r} earned {reward} ({reward_name(config.reward)} times "
                f"reward_scale={config.reward_scale:g}), expected a finite number; nothing was trained. "
                "Check the rewards of the environment, or lower reward_scale."
            )
    penalties = form_penalties(groups, config)
    if config.advantage_statistics == "rows":
        advantages = normalised_returns(returns[trajectory_ids] - penalties, group_ids[trajectory_ids], config)
    else:
        advantages = penalised_advantages(
            returns,
            group_ids,
            penalties,
            trajectory_ids,
            config.advantage_epsilon,
            by_deviation=config.advantage_norm == "mean_std_norm",
            estimator=config.advantage_estimator,
        )
    if config.reward == "per_turn":
        advantages = advantages + config.turn_coeff * turn_advantages(groups, config)
    return advantages


def turn_advantages(groups: Sequence[TrajectoryGroup], config: RunSettings) -> Tensor:
    """Return advantages of turns, float64 ``[K]``: discounted returns relative to the same turn of the group's rollouts.

    A_k = (G_k − mean) / (deviation + ε) with the return G_k = r_k + γ G_{k+1}, where r_k is the reward of turn k and γ is
    ``turn_discount``. Mean and deviation are over the returns of turn k in all rollouts of the group that have a turn k. All
    rollouts of a group start in the same state.

    Raises:
        TrainingDivergedError: a return is not finite.
    """
    returns = config.reward_scale * step_returns(groups, config.reward, config.turn_discount)
    if not bool(returns.isfinite().all()):
        raise TrainingDivergedError(
            f"Rewards of turns, added up and times reward_scale={config.reward_scale:g}, are not finite; nothing was trained. "
            "Check the rewards of the environment, or lower reward_scale."
        )
    return normalised_returns(returns, turn_index_ids(groups), config)


def form_penalties(groups: Iterable[TrajectoryGroup], config: RunSettings) -> Tensor:
    """Return the penalty of each turn of all completed rollouts, float64 ``[K]``.

    A response without the format that the prompt requires gets ``invalid_action_penalty``, every other response gets 0. Unlike
    rewards, penalties are not multiplied by ``reward_scale``.
    """
    penalties = [
        0.0 if turns[index].valid else config.invalid_action_penalty for _, index, turns in _indexed_turns(groups)
    ]
    return torch.tensor(penalties, dtype=torch.float64)


def normalised_returns(returns: Tensor, group_ids: Tensor, config: RunSettings) -> Tensor:
    """Convert each of the returns ``[N]`` to its advantage relative to its group, as ``advantage_norm`` specifies."""
    by_deviation = config.advantage_norm == "mean_std_norm"
    return group_relative_advantages(returns, group_ids, config.advantage_epsilon, by_deviation=by_deviation)


def anchor_ids(groups: Iterable[TrajectoryGroup], window: int = 1) -> Tensor:
    """Return an id for each turn of the completed rollouts, int64 ``[K]``; turns in the same situation have equal ids.

    Turns of a group of rollouts have the same id if their last ``window`` raw observations are equal; with a ``window`` of 0,
    all turns of a group have the same id. A turn with fewer than ``window`` observations so far has a unique id.
    """

    def key(group: int, index: int, turns: Sequence[Turn]) -> Hashable:
        observations = tuple(turn.observation for turn in turns[max(0, index + 1 - window) : index + 1])
        return (group, observations) if len(observations) == window else object()

    return _number_keys(key(*indexed) for indexed in _indexed_turns(groups))


def turn_index_ids(groups: Iterable[TrajectoryGroup]) -> Tensor:
    """Return an id for each turn, int64 ``[K]``; turns of a group with the same index in their rollouts have equal ids."""
    return _number_keys((group, index) for group, index, _ in _indexed_turns(groups))


def _indexed_turns(groups: Iterable[TrajectoryGroup]) -> Iterator[tuple[int, int, Sequence[Turn]]]:
    """For each turn of the completed rollouts, yield its group's index, its index in its rollout, and this rollout's turns."""
    for group_index, group in enumerate(groups):
        for trajectory in group.completed:
            for index in range(len(trajectory.turns)):
                yield group_index, index, trajectory.turns


def _number_keys(keys: Iterable[Hashable]) -> Tensor:
    """Number keys from 0 in the order of their first occurrence; equal keys get equal numbers, int64 ``[K]``."""
    numbers: dict[Hashable, int] = {}
    return torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys], dtype=torch.int64)


def step_returns(groups: Iterable[TrajectoryGroup], reward: Reward, discount: float) -> Tensor:
    """Return the discounted sum of unscaled rewards from each turn to the end of its rollout, float64 ``[K]``.

    Args:
        groups: the groups of an update; K turns in their completed rollouts.
        reward: the setting ``reward``. Success, score or the value of a reward function count as the last turn's reward;
            ``"return"`` and ``"per_turn"`` use the environment's reward of each turn.
        discount: γ, the factor per turn.
    """
    trajectories = [trajectory for group in groups for trajectory in group.completed]
    rewards = [value for trajectory in trajectories for value in _rewards(trajectory, reward)]
    return discounted_returns(torch.tensor(rewards, dtype=torch.float64), trajectory_ids_of(trajectories), discount)


def _rewards(trajectory: Trajectory, reward: Reward) -> list[float]:
    if reward in ("return", "per_turn"):
        return [turn.reward for turn in trajectory.turns]
    return [0.0] * (len(trajectory.turns) - 1) + [trajectory.outcome_reward(reward)]
