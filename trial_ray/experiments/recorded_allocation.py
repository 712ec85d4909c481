"""Turn weights that training applied, out of RUN/training and the recorded trajectories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trial_ray.environments.adapter import EnvironmentAdapter
from trial_ray.errors import UserInputError
from trial_ray.reports.run_record import Allocation, Environment
from trial_ray.reports.traces import Trace, TracedTurn
from trial_ray.rollout.partitions import partitions
from trial_ray.rollout.recording import read_turns

KEYS = ("group_id", "rollout_index", "turn_index")
VALUES = ("turn_score", "turn_weight")


def read_allocation(folder: Path, environments: Sequence[Environment], max_staleness: int = 0) -> Allocation:
    """The newest iteration of which training recorded turn weights.

    Args:
        folder: of the run.
        environments: of the run, whose adapters tell classes of actions.
        max_staleness: of the run: iterations for which a group may have waited for its update.

    Raises:
        UserInputError: nothing was recorded, or it cannot be read; the message is for the report's reader.
    """
    recorded = partitions(folder / "training")
    if not recorded:
        raise UserInputError("RUN/training was not recorded, so multipliers by class of action are not known.")
    weighed = False
    for iteration, partition in reversed(recorded.items()):
        weights = _weights(partition)
        if weights:
            weighed = True
            rows = _recorded(folder / "trajectories", iteration, weights, max_staleness)
            if traces := _traces(rows, weights, environments):
                found = {row["group_id"] for row in rows}
                return Allocation(iteration, traces, len({group for group, _, _ in weights} - found))
    if weighed:
        raise UserInputError(
            "RUN/trajectories holds none of the groups that RUN/training has turn weights of, in the iterations of the updates "
            f"and {max_staleness} before them (max_staleness)."
        )
    raise UserInputError(
        "RUN/training holds no turn weights: the method weighs no turns, or trajectories were not recorded."
    )


def _weights(partition: Path) -> dict[tuple[str, int, int], tuple[float, float]]:
    found = {}
    for file in sorted(partition.glob("*.parquet")):
        try:
            present = pq.read_schema(file).names
            if missing := [name for name in (*KEYS, *VALUES) if name not in present]:
                raise UserInputError(f"Turn weights cannot be read: {file.name} lacks the column {missing[0]}.")
            table = pq.read_table(file, columns=[*KEYS, *VALUES], partitioning=None)
        except (OSError, pa.ArrowException) as error:
            raise UserInputError(
                f"Turn weights cannot be read: {file.name} in {partition.name} ({_first_line(error)})."
            ) from error
        for row in table.to_pylist():
            if None not in row.values():
                found[row["group_id"], row["rollout_index"], row["turn_index"]] = (
                    row["turn_score"],
                    row["turn_weight"],
                )
    return found


def _recorded(
    trajectories: Path, iteration: int, weights: Mapping[tuple[str, int, int], Any], max_staleness: int
) -> list[dict[str, Any]]:
    """The recorded turns of the trajectories that have weights; some may have been sampled in an earlier iteration."""
    wanted, rows, recorded = {group for group, _, _ in weights}, [], partitions(trajectories)
    for number in range(iteration, max(0, iteration - max_staleness - 1), -1):
        if number < iteration and number not in recorded:
            continue
        table = read_turns(trajectories, number).drop_columns(["prompt_ids", "logprobs", "observation"])
        found = [row for row in table.to_pylist() if row["group_id"] in wanted]
        rows += found
        wanted -= {row["group_id"] for row in found}
        if not wanted:
            break
    return rows


def _traces(
    rows: Sequence[Mapping[str, Any]],
    weights: Mapping[tuple[str, int, int], tuple[float, float]],
    environments: Sequence[Environment],
) -> list[Trace]:
    adapters = {known.name: known.adapter for known in environments}
    trajectories: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        trajectories.setdefault((row["group_id"], row["rollout_index"]), []).append(row)
    return [
        _trace(turns, weights, adapters.get(turns[0]["environment"]))
        for turns in trajectories.values()
        if all(_key(turn) in weights for turn in turns)
    ]


def _key(turn: Mapping[str, Any]) -> tuple[str, int, int]:
    return turn["group_id"], turn["rollout_index"], turn["turn_index"]


def _trace(
    turns: Sequence[Mapping[str, Any]],
    weights: Mapping[tuple[str, int, int], tuple[float, float]],
    adapter: EnvironmentAdapter | None,
) -> Trace:
    first = turns[0]
    known = adapter or EnvironmentAdapter(first["environment"])
    classes = known.turn_classes([turn["action"] for turn in turns], first["ended"] == "terminated")
    return Trace(
        first["task_id"],
        known.family_titles.get(first["family"], first["family"]),
        first["success"],
        [
            TracedTurn(turn["action"], turn["outcome"], name, *weights[_key(turn)], len(turn["response_ids"]))
            for turn, name in zip(turns, classes, strict=True)
        ],
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
