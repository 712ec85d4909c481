"""Files that record an update: values of each turn as Parquet, inputs of the update as JSON.

``docs/runs.md`` describes every column. The Parquet rows, one per turn, can be joined with the recorded trajectories by
``group_id``, ``rollout_index`` and ``turn_index``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import pyarrow as pa

from trial_ray.errors import CheckpointError
from trial_ray.files import Json, checked_content, read_json, write_json
from trial_ray.learner.rows import TurnRows
from trial_ray.rollout.recording import FLOATS, IDS, Folder, new_schema, partition, partitions, read_rows, write_rows
from trial_ray.trajectory import TrajectoryGroup

TRAINING_SCHEMA_VERSION = 2
"""Increased by one when a column changes its name, type or meaning."""

TRAINING_SCHEMA = new_schema(
    (
        ("group_id", "string", "the group of rollouts, as in the trajectories"),
        ("rollout_index", "int32", "index of the rollout in its group"),
        ("turn_index", "int32", "index of the turn in its trajectory"),
        (
            "advantage",
            "float64",
            "advantage of the turn: its trajectory's group-relative one (TRIAL paper, Eq. 1), less the penalty for a "
            "response without the required format, plus the terms of the method",
        ),
        (
            "turn_score",
            "float64",
            "mean absolute hindsight log-ratio of the turn's tokens, each bounded by `gap_clip`, in nats (TRIAL paper, Eq. 5); "
            "null if the method scores no turns",
        ),
        (
            "turn_weight",
            "float64",
            "multiplier of the turn's dense loss, whose token-weighted mean over the trajectory is 1 (TRIAL paper, Eq. 6); "
            "null where the method weighs no turns",
        ),
        (
            "gap",
            FLOATS,
            "log-probability of each response token with the teacher context minus without, in nats, not clipped, `[y]`; null "
            "without a teacher context",
        ),
        (
            "learner_logprobs",
            FLOATS,
            "log-probability of each response token under the learner before the update, in nats, `[y]`",
        ),
        ("evidence_ids", IDS, "tokens of the teacher context, which is inserted into `prompt_ids`; null without one"),
        (
            "evidence_at",
            "int32",
            "index in `prompt_ids` before which `evidence_ids` are inserted; null without a teacher context",
        ),
    ),
    TRAINING_SCHEMA_VERSION,
)
"""Columns of a Parquet file, each with its description; readers add ``iteration`` from the folder's name."""

# The name begins with an underscore so that readers of the partitioned Parquet folder ignore this file.
UPDATE_FILE = "_update.json"
UPDATE_SCHEMA, UPDATE_SCHEMA_VERSION = "trial_ray/update", 1


def write_training(
    folder: Folder,
    iteration: int,
    groups: Sequence[TrajectoryGroup],
    rows: TurnRows,
    indices: Sequence[int] | np.ndarray,
    writer_id: str,
) -> Path:
    """Write some turns of one update to a new Parquet file, and return its path.

    Args:
        folder: root of the recording; created if missing.
        iteration: iteration of the update.
        groups: groups of the update.
        rows: the turns of all groups as training samples (rows).
        indices: indices of the rows to write.
        writer_id: id of the writer, such as ``"learner00"``; a part of the file's name.
    """
    return write_rows(folder, iteration, list(_records(groups, rows, indices)), TRAINING_SCHEMA, writer_id)


def _records(groups: Sequence[TrajectoryGroup], rows: TurnRows, indices: Sequence[int] | np.ndarray) -> Iterator[Json]:
    keys = [
        {"group_id": group.group_id, "rollout_index": rollout_index, "turn_index": turn_index}
        for group in groups
        for rollout_index, trajectory in enumerate(group.trajectories)
        if trajectory.is_completed
        for turn_index in range(len(trajectory.turns))
    ]
    logprobs, gap = rows.logprobs.float(), None
    if rows.hindsight_logprobs is not None:
        gap = (rows.hindsight_logprobs - rows.logprobs).float()
    for row in indices:
        tokens, context = rows.token_positions([row]), None if gap is None else rows.turns[row].teacher_context
        yield keys[row] | {
            "advantage": rows.advantages[row].item(),
            "turn_score": None if rows.scores is None else rows.scores[row].item(),
            "turn_weight": None if rows.weights is None else rows.weights[row].item(),
            "gap": None if gap is None else gap[tokens].numpy(),
            "learner_logprobs": logprobs[tokens].numpy(),
            "evidence_ids": None if context is None else context.ids,
            "evidence_at": None if context is None else context.insert_at,
        }


def read_training(folder: Folder, iteration: int | None = None) -> pa.Table:
    """Read the recorded updates of one or all iterations, one row per turn, with the columns of ``TRAINING_SCHEMA`` and
    ``iteration``.

    Raises:
        UserInputError: ``folder`` has no record, or a file cannot be read, see :func:`~trial_ray.rollout.recording.read_rows`.
    """
    advice = (
        "`trial-ray train` records it in RUN/training, unless an update has more response tokens than max_recorded_tokens; "
        "`trial-ray replay RUN --iteration K --set training_folder=DIR` records it afterwards."
    )
    return read_rows(folder, iteration, TRAINING_SCHEMA, "record of training", advice)


@dataclass(frozen=True)
class UpdateRecord:
    """Data that a replay of an update needs besides the trajectories and the learner's state, such as checksums of weights.

    Attributes:
        iteration: iteration of the update.
        group_ids: ids of the groups of the update, in the order in which the learner got them.
        timesteps: the argument ``timesteps`` of ``GRPOLearner.update``.
        num_threads: number of torch threads in the driver if the learner runs in it, since the rounding of sums depends on it;
            ``None`` if learners are actors, in which Ray sets the number of threads.
        weights_before: checksum of the weights that the engines sampled with (``engines.weights.weights_checksum``).
        weights_after: checksum of the weights after the update.
    """

    iteration: int
    group_ids: list[str]
    timesteps: dict[str, int]
    num_threads: int | None
    weights_before: str
    weights_after: str

    def write(self, folder: Folder) -> Path:
        """Write the record to the folder of its iteration below ``folder``, the root of the recording."""
        head = {"schema": UPDATE_SCHEMA, "schema_version": UPDATE_SCHEMA_VERSION}
        return write_json(partition(folder, self.iteration) / UPDATE_FILE, head | asdict(self))

    @classmethod
    def read(cls, folder: Folder, iteration: int) -> UpdateRecord:
        """Read a record that :meth:`write` wrote.

        Raises:
            CheckpointError: the record is missing, damaged, or of another version.
        """
        path = partition(folder, iteration) / UPDATE_FILE
        if not path.exists():
            recorded = ", ".join(map(str, partitions(folder))) or "none"
            raise CheckpointError(
                f"{path} does not exist: iteration {iteration} was not trained, or trained nothing. "
                f"Recorded iterations: {recorded}."
            )
        with checked_content(path):
            values = read_json(path, UPDATE_SCHEMA, UPDATE_SCHEMA_VERSION)
            return cls(**{column.name: values[column.name] for column in fields(cls)})
