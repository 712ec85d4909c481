"""Reads a run folder: metrics, evaluations, and how its objective was allocated."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trial_ray.algorithms.methods import method_title
from trial_ray.environments.adapter import EnvironmentAdapter
from trial_ray.environments.registry import find_adapter
from trial_ray.errors import UserInputError
from trial_ray.evaluation.results import EvaluationResult
from trial_ray.files import read_lines
from trial_ray.reports.dynamics import read_whole_lines
from trial_ray.reports.records import Allocation, CostRow, Environment, RunRecord
from trial_ray.reports.traces import Trace, TracedTurn
from trial_ray.rollout.partitions import partitions
from trial_ray.rollout.recording import read_turns
from trial_ray.runs.commands import command_of, commands_in_force, setting_changes
from trial_ray.runs.config_record import backbone_of_settings
from trial_ray.runs.cost import PHASES, cost_sections
from trial_ray.runs.evaluations import read_name
from trial_ray.runs.metric_files import flatten

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


TRIAL_RESULTS = "result.json"
"""Tune's metrics of a trial, one nested JSON object an iteration."""
SWEEP_TABLE = "sweep.json"
UNFINISHED = {
    "running": "The run has not ended, or was killed.",
    "interrupted": "The run was interrupted; `trial-ray train --resume` continues it.",
    "failed": "The run failed; error.log in its folder says why.",
}
"""What a run lacks that did not come to its end, by its state."""
RUN_FILES = ("run.json", "resolved_config.json", "metrics.jsonl")


def read_runs(folder: Path) -> list[RunRecord]:
    """The run of a run folder, or the trials of a sweep's folder.

    Raises:
        UserInputError: it is neither.
    """
    folder = folder.expanduser().resolve()
    if any((folder / name).is_file() for name in RUN_FILES):
        return [read_run(folder)]
    trials = sorted(path.parent for path in folder.glob(f"*/{TRIAL_RESULTS}"))
    if trials or (folder / SWEEP_TABLE).is_file():
        return read_sweep(folder, trials)
    if not folder.is_dir():
        raise UserInputError(f"{folder} does not exist. Name the folder of a run or of a sweep.")
    empty = "is empty" if not any(folder.iterdir()) else f"has none of {', '.join(RUN_FILES)} or {SWEEP_TABLE}"
    raise UserInputError(f"{folder} is not the folder of a run or of a sweep: it {empty}. Name one.")


def read_run(folder: Path) -> RunRecord:
    """What a run folder holds; a file that is missing or damaged is named in ``missing``."""
    run = RunRecord(folder)
    _read_metrics(run)
    _read_config(run)
    about = _json(run, "run.json")
    run.state = str(about.get("state", ""))
    if run.state in UNFINISHED:
        run.missing.append(UNFINISHED[run.state])
    versions = about.get("versions")
    run.versions = {**(versions if isinstance(versions, dict) else {}), **run.versions, **_platform(about)}
    _read_evaluations(run)
    card = _json(run, "cost.json")
    _try(run, "cost.json", lambda: _read_cost(run, card))
    if run.hindsight_start is not None:
        _try(run, "", lambda: _read_allocation(run))
    return run


def _read_allocation(run: RunRecord) -> None:
    run.allocation = read_allocation(run.path, run.environments, int(run.settings.get("max_staleness") or 0))
    if lost := run.allocation.lost:
        run.missing.append(
            f"Multipliers by class of action lack {lost} group{'' if lost == 1 else 's'} of iteration "
            f"{run.allocation.iteration}, whose trajectories are not in RUN/trajectories."
        )


def _platform(about: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(about[name]) for name in ("python", "platform", "cores", "started", "updated") if name in about}


def _json(run: RunRecord, name: str) -> dict[str, Any]:
    """The object in a file of the run's folder; empty where there is none, which is noted."""
    try:
        value = json.loads((run.path / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        run.missing.append(f"{name} is missing.")
        return {}
    except (OSError, ValueError, RecursionError) as error:
        run.missing.append(f"{name} cannot be read ({error}).")
        return {}
    if isinstance(value, dict):
        return value
    run.missing.append(f"{name} holds no JSON object.")
    return {}


def _try(run: RunRecord, name: str, read: Callable[[], None]) -> None:
    """Read a part of a run that may be of another version, or changed by hand."""
    try:
        read()
    except UserInputError as error:
        run.missing.append(str(error))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
        run.missing.append(f"{name} is not what this version writes ({type(error).__name__}: {error}).".lstrip())


def _read_config(run: RunRecord) -> None:
    record = _json(run, "resolved_config.json")
    if record:
        _try(run, "resolved_config.json", lambda: _apply_config(run, record))


def _apply_config(run: RunRecord, newest: Mapping[str, Any]) -> None:
    """The settings of the newest iteration, and how they differ from earlier ones."""
    commands = commands_in_force(newest)
    run.changes, run.versions = setting_changes(commands), _versions(commands)
    record = command_of(newest, run.iterations or None)
    settings = dict(record["settings"])
    run.method = method_title(str(record["method"]))
    run.settings, run.seed = settings, settings.get("seed")
    if settings.get("hindsight_coeff"):
        run.hindsight_start = int(settings.get("hindsight_start_iteration", 1))
    run.backbone = backbone_of_settings(settings)
    run.environments = [_environment(described) for described in record["environments"]]


def _versions(commands: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Of every package the versions that the commands had, in order."""
    found: dict[str, list[str]] = {}
    for command in commands:
        for name, version in dict(command.get("versions", {})).items():
            found.setdefault(name, []).append(str(version))
    return {name: ", then ".join(dict.fromkeys(versions)) for name, versions in found.items()}


def _environment(described: Mapping[str, Any]) -> Environment:
    env_id = str(described["env_id"])
    labels = described.get("labels")
    adapter = EnvironmentAdapter(env_id, **labels) if labels else find_adapter(env_id)
    return Environment(str(described.get("name", env_id.rpartition("/")[2])), adapter)


def _read_metrics(run: RunRecord) -> None:
    try:
        run.metrics, damaged = read_whole_lines(run.path / "metrics.jsonl")
    except UserInputError as error:
        run.missing.append(str(error))
        return
    if damaged:
        run.missing.append(f"{_lines(damaged)} of metrics.jsonl cut off or damaged, and left out.")
    if not run.metrics:
        run.missing.append("metrics.jsonl holds no iteration.")


def _lines(number: int) -> str:
    return "1 line is" if number == 1 else f"{number} lines are"


def _read_evaluations(run: RunRecord) -> None:
    for path in sorted((run.path / "evaluations").glob("*.json")):
        named = read_name(path)
        if named is None:
            run.missing.append(f"evaluations/{path.name} names no iteration and is left out.")
            continue
        try:
            result = EvaluationResult.load(path)
        except UserInputError as error:
            run.missing.append(str(error))
            continue
        name, iteration = named
        run.evaluations.setdefault(name, {})[iteration] = result


def _read_cost(run: RunRecord, card: Mapping[str, Any]) -> None:
    if card:
        sections = [[CostRow(*row) for row in section] for section in cost_sections(card)]
        run.seconds = {PHASES[phase]: float(value) for phase, value in card["seconds"].items()}
        run.cost = sections


def read_sweep(folder: Path, trials: list[Path]) -> list[RunRecord]:
    """The trials of a sweep, in the order of its table where it has one.

    Args:
        folder: of the sweep.
        trials: folders that hold the metrics of a trial.
    """
    table = RunRecord(folder)
    content = _json(table, SWEEP_TABLE)
    runs: list[RunRecord] = []

    def read() -> None:
        for row in content.get("trials", []):
            path = next((path for path in trials if str(row["name"]) in path.name), folder / str(row["name"]))
            runs.append(_trial(path, row))

    _try(table, SWEEP_TABLE, read)
    known = {run.path for run in runs}
    runs += [_trial(path, {}) for path in trials if path not in known]
    if not runs:
        runs = [table]
    elif table.missing:
        runs[0].missing += [f"The sweep has no table: {reason}" for reason in table.missing]
    return runs


def _trial(path: Path, row: Mapping[str, Any]) -> RunRecord:
    run = RunRecord(
        path,
        title=str(row.get("name", "")),
        state=str(row.get("status", "")),
        parameters=dict(row.get("parameters") or {}),
    )
    seed = run.parameters.get("seed")
    run.seed = seed if isinstance(seed, int) else None
    if run.state == "failed":
        run.missing.append("The trial failed; error.txt in its folder says why.")
    try:
        lines = read_lines(path / TRIAL_RESULTS)
    except OSError as error:
        run.missing.append(f"{TRIAL_RESULTS} cannot be read ({error}).")
        return run
    metrics = [flat for line in lines if (flat := _trial_metrics(line))]
    if len(metrics) < len(lines):
        run.missing.append(f"{_lines(len(lines) - len(metrics))} of {TRIAL_RESULTS} cut off or damaged, and left out.")
    run.metrics = _without_replaced(metrics)
    return run


def _without_replaced(metrics: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    """One line an iteration: a trial that went on from a checkpoint made the iterations after it again."""
    kept: list[dict[str, float]] = []
    for line in metrics:
        while kept and kept[-1]["iteration"] >= line["iteration"]:
            kept.pop()
        kept.append(line)
    return kept


def _trial_metrics(line: str) -> dict[str, float]:
    try:
        flat = flatten(json.loads(line))
        return {"iteration": int(flat["training_iteration"]), **flat}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return {}
