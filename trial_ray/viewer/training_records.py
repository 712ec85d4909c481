"""What training made of each recorded turn: advantage, multiplier, gaps and the learner's log-probabilities."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields

import pyarrow as pa
import pyarrow.compute as pc

from trial_ray.learner.training_record import read_training
from trial_ray.rollout.partitions import partition
from trial_ray.rollout.trajectory import Turn

Key = tuple[str, int | None, int]
"""``group_id``, ``rollout_index``, ``turn_index``."""


@dataclass(frozen=True, slots=True)
class TrainedTurn:
    """One trained turn row.

    Attributes:
        advantage: of the row.
        turn_score: s_k (Eq. 5), in nats; ``None`` where the method has none.
        turn_weight: w_k (Eq. 6), the multiplier of the turn; ``None`` likewise.
        gap: signed hindsight gap of each response token in nats, ``[y]``; ``None`` without a hindsight view.
        learner_logprobs: of each response token under the learner before the update, ``[y]``.
        evidence_ids: what the hindsight view inserts into the prompt; ``None`` without one.
        evidence_at: index in the prompt before which it does; ``None`` without one, and where an earlier release recorded it.
    """

    advantage: float | None
    turn_score: float | None
    turn_weight: float | None
    gap: list[float] | None
    learner_logprobs: list[float] | None
    evidence_ids: list[int] | None
    evidence_at: int | None = None

    def split_prompt(self, turn: Turn) -> tuple[list[int], list[int]]:
        """Ids of the prompt before and after the place of the evidence; without any, of the end of the user's message."""
        at = turn.insert_at if self.evidence_at is None else self.evidence_at
        ids = turn.prompt_ids.tolist()
        return ids[:at], ids[at:]


_COLUMNS = tuple(field.name for field in fields(TrainedTurn))


def read_trained_turns(
    folder: str | os.PathLike[str], iterations: Iterable[int], groups: Collection[str]
) -> dict[Key, TrainedTurn]:
    """The turn rows of some groups that some iterations trained on; none where nothing was recorded.

    Args:
        folder: ``RUN/training``.
        iterations: in which the groups may have been trained on.
        groups: their ``group_id``.

    Raises:
        UserInputError: a file is cut off, of another version of the schema, or lacks columns.
    """
    wanted, found = pa.array(groups, pa.string()), {}
    for number in iterations:
        # Of an update with too many tokens, only what a replay needs was recorded.
        if not any(partition(folder, number).glob("*.parquet")):
            continue
        table = read_training(folder, number)
        for row in table.filter(pc.is_in(table["group_id"], wanted)).to_pylist():
            key = row["group_id"], row["rollout_index"], row["turn_index"]
            found[key] = TrainedTurn(**{name: row[name] for name in _COLUMNS})
    return found
