"""One run as the viewer reads it: recorded trajectories joined with what training made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trial_ray.environments.adapter import EnvironmentAdapter
from trial_ray.errors import UserInputError
from trial_ray.rollout.partitions import partitions
from trial_ray.rollout.recording import read_trajectories, read_turns
from trial_ray.rollout.trajectory import Trajectory
from trial_ray.viewer.token_texts import TokenTexts
from trial_ray.viewer.training_records import TrainedTurn, read_trained_turns


@dataclass(frozen=True, slots=True)
class RecordedTrajectory:
    """One trajectory.

    Attributes:
        iteration: in which it was recorded.
        number: among those of its iteration, from 1, in the order group, rollout.
        group_id: the group of rollouts of its task; empty where it failed before its first turn.
        rollout_index: its index in the group; ``None`` likewise.
        trajectory: what was sampled.
        trained: by turn, what training recorded of it; ``None`` where it recorded nothing.
        classes: by turn, one of ``environments.adapter.ACTION_CLASSES``.
    """

    iteration: int
    number: int
    group_id: str
    rollout_index: int | None
    trajectory: Trajectory
    trained: Sequence[TrainedTurn | None]
    classes: Sequence[str]

    @property
    def advantage(self) -> float | None:
        """Mean over its trained turns; ``None`` where it was not trained on."""
        found = [turn.advantage for turn in self.trained if turn is not None and turn.advantage is not None]
        return float(np.mean(found)) if found else None


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """Where a run's records lie, and what reads them.

    Attributes:
        name: what the run is called on the page.
        trajectories: folder of the recorded rollouts.
        training: folder of what training recorded; need not exist.
        iterations: which to read.
        max_staleness: updates by which training on a rollout may come after its recording.
        adapters: by the name of the run's environment, for the classes of actions.
        tokens: texts of the tokens; ``None`` where the run has no tokenizer yet.
    """

    name: str
    trajectories: Path
    training: Path
    iterations: Sequence[int]
    max_staleness: int
    adapters: Mapping[str, EnvironmentAdapter]
    tokens: TokenTexts | None

    def read(self, iteration: int) -> list[RecordedTrajectory]:
        """The trajectories of one iteration.

        Raises:
            UserInputError: a file is of another version of the schema, lacks columns or is cut off, or what training recorded
                is of other responses.
        """
        turns = read_turns(self.trajectories, iteration)
        trajectories = read_trajectories(self.trajectories, iteration)
        # Both come in the same order; a rollout that failed before its first turn has no rows to take its group from.
        groups, rollouts = turns["group_id"].to_pylist(), turns["rollout_index"].to_pylist()
        keys = iter(dict.fromkeys(zip(groups, rollouts, strict=True)))
        last = iteration + self.max_staleness
        updates = [number for number in partitions(self.training) if iteration <= number <= last]
        trained = read_trained_turns(self.training, updates, sorted(set(groups)))
        found = []
        for number, trajectory in enumerate(trajectories, start=1):
            group, rollout = next(keys) if trajectory.turns else ("", None)
            rows = [trained.get((group, rollout, turn)) for turn in range(len(trajectory.turns))]
            self._check(trajectory, rows)
            found.append(
                RecordedTrajectory(iteration, number, group, rollout, trajectory, rows, self._classes(trajectory))
            )
        return found

    def _check(self, trajectory: Trajectory, rows: Sequence[TrainedTurn | None]) -> None:
        for turn, row in zip(trajectory.turns, rows, strict=True):
            for values in () if row is None else (row.gap, row.learner_logprobs):
                if values is not None and len(values) != len(turn.response_ids):
                    raise UserInputError(
                        f"{self.training} has {len(values)} values for a response of {len(turn.response_ids)} tokens of task "
                        f"{trajectory.task_id}: it is not of the same run as {self.trajectories}."
                    )

    def _classes(self, trajectory: Trajectory) -> list[str]:
        adapter = self.adapters.get(trajectory.environment, EnvironmentAdapter(trajectory.environment or "unknown"))
        return adapter.turn_classes([turn.action for turn in trajectory.turns], trajectory.ended == "terminated")
