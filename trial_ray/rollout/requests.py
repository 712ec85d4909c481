"""What the driver asks an env runner for, and the light answer that comes back beside the object-store reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ray import ObjectRef

from trial_ray.errors import EnvironmentFaultError, InfrastructureError
from trial_ray.inference.protocol import SamplingParams
from trial_ray.rollout.rollout_counts import RolloutCounts
from trial_ray.rollout.trajectory import EpisodeResult, TrajectoryGroup


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """Play ``group_size`` rollouts of one task.

    Attributes:
        index: index in the iteration, or in the whole run where iterations overlap; answers are put back into this order.
        task_id: the task.
        group_size: rollouts.
        seed: seeds environment and sampling of the whole group.
        environment: index of the run's environment that the task belongs to.
    """

    index: int
    task_id: str
    group_size: int
    seed: int
    environment: int = 0


@dataclass(frozen=True, slots=True)
class SampleSettings:
    """How a batch of requests is played.

    Attributes:
        env_configs: keyword arguments of each of the run's environments.
        params: sampling of responses.
        iteration: in which the requests are made, for the records; 0 before training.
        keep_trajectories: put trajectories into the object store and record them (training), or only count (evaluation).
        seeded: give every response a seed that follows from the group's.
    """

    env_configs: tuple[dict[str, Any], ...]
    params: SamplingParams
    iteration: int
    keep_trajectories: bool
    seeded: bool = False


@dataclass(frozen=True, slots=True)
class GroupSample:
    """One group as played.

    Attributes:
        request: what was asked for.
        ref: reference to ``[TrajectoryGroup]``; ``None`` when trajectories are not kept.
        episodes: result of every rollout, failed ones included.
        errors: what ended the failed ones.
        num_survivors: rollouts that can be trained on.
        num_rows: turns of the survivors.
        zero_variance: whether all survivors earned the same reward, so that outcome advantages are zero.
        counts: of all rollouts, for the metrics.
        too_long: where a prompt of the task's first turn does not fit, which one; playing it again would not help.
        weight_versions: oldest and newest version of the weights that sampled the survivors' turns; (0, 0) without turns.
        num_environment_faults: rollouts that failed by their environment.
    """

    request: GroupRequest
    ref: ObjectRef[list[TrajectoryGroup]] | None
    episodes: list[EpisodeResult]
    errors: list[str]
    num_survivors: int
    num_rows: int
    zero_variance: bool
    counts: RolloutCounts
    weight_versions: tuple[int, int] = (0, 0)
    num_environment_faults: int = 0
    too_long: str | None = None

    @classmethod
    def from_group(
        cls,
        request: GroupRequest,
        group: TrajectoryGroup,
        ref: ObjectRef[list[TrajectoryGroup]] | None,
        reward: str,
        row_penalty: float,
    ) -> GroupSample:
        """Count what was played; ``reward`` and ``row_penalty`` as in :meth:`TrajectoryGroup.has_variance`."""
        survivors = group.survivors
        versions = [turn.weight_version for trajectory in survivors for turn in trajectory.turns] or [0]
        return cls(
            request=request,
            ref=ref,
            episodes=[EpisodeResult.from_trajectory(trajectory) for trajectory in group.trajectories],
            errors=[trajectory.error or "" for trajectory in group.trajectories if trajectory.failed],
            num_survivors=len(survivors),
            num_rows=sum(len(trajectory.turns) for trajectory in survivors),
            zero_variance=not group.has_variance(reward, row_penalty),
            counts=RolloutCounts.of(group.trajectories),
            weight_versions=(min(versions), max(versions)),
            num_environment_faults=sum(trajectory.failed_by == "environment" for trajectory in group.trajectories),
            too_long=next(
                (each.error for each in group.trajectories if each.ended == "prompt_limit" and not each.turns), None
            ),
        )


def failure_of(found: str, samples: Sequence[GroupSample], losses: Sequence[str]) -> InfrastructureError:
    """The error of groups that could not be played: an :class:`EnvironmentFaultError` where nothing but environments failed.

    An environment that failed on every attempt would fail again after a restart of the run.

    Args:
        found: what could not be played.
        samples: the groups as they were played last.
        losses: why env runners were lost.
    """
    errors = [error for sample in samples for error in sample.errors]
    faults = sum(sample.num_environment_faults for sample in samples)
    kind = EnvironmentFaultError if errors and not losses and faults == len(errors) else InfrastructureError
    causes = [*errors, *losses, *(sample.too_long for sample in samples if sample.too_long is not None)]
    return kind(found + (f"; the first error was: {causes[0]}" if causes else ": no env runner was left to play them."))
