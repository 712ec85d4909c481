"""What training made of each recorded turn: advantage, multiplier, gaps and the learner's log-probabilities."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from trial_ray.errors import UserInputError

Key = tuple[str, int | None, int]
"""``group_id``, ``rollout_index``, ``turn_index``."""
_KEYS = ("group_id", "rollout_index", "turn_index")


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
    """

    advantage: float | None
    turn_score: float | None
    turn_weight: float | None
    gap: list[float] | None
    learner_logprobs: list[float] | None
    evidence_ids: list[int] | None


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
        UserInputError: a file is cut off or lacks columns.
    """
    wanted, found = pa.array(groups), {}
    for file in (file for number in iterations for file in _files(Path(folder), number)):
        try:
            table = pq.ParquetFile(file).read()
        except (pa.ArrowInvalid, OSError) as error:
            raise UserInputError(f"{file} cannot be read as Parquet ({error}); it may be cut off.") from error
        if missing := [name for name in (*_KEYS, *_COLUMNS) if name not in table.column_names]:
            raise UserInputError(
                f"{file} lacks the columns {', '.join(missing)}; read it with the release that wrote it."
            )
        rows = table.select([*_KEYS, *_COLUMNS]).filter(pc.is_in(table["group_id"], wanted))
        for row in rows.to_pylist():
            key = row["group_id"], row["rollout_index"], row["turn_index"]
            found[key] = TrainedTurn(**{name: row[name] for name in _COLUMNS})
    return found


def _files(folder: Path, iteration: int) -> list[Path]:
    return sorted((folder / f"iteration={iteration:05d}").glob("*.parquet"))
