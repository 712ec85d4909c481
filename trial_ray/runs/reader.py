"""Reads run folders: for a report, which it writes, all that was measured, for the viewer what was sampled and trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc

from trial_ray.algorithms.methods import method_title
from trial_ray.environments.adapter import EnvironmentAdapter
from trial_ray.environments.registry import find_adapter
from trial_ray.errors import CheckpointError, TrialRayError, UserInputError, first_line
from trial_ray.evaluation.results import EvaluationResult
from trial_ray.files import nearest_folder, read_json, write_text
from trial_ray.learner.recording import read_training
from trial_ray.models.loading import load_tokenizer
from trial_ray.reports.findings import require_something
from trial_ray.reports.recorded import RecordedTrajectory, TokenTexts
from trial_ray.reports.records import Allocation, RunGroup, RunRecord, Trace, TracedTurn, group_runs
from trial_ray.reports.report import report_page
from trial_ray.rollout.partitions import partitions
from trial_ray.runs.checkpoints import RUN_FILE, find_tokenizer
from trial_ray.runs.config_record import backbone_of_settings, command_of, commands_in_force, setting_changes
from trial_ray.runs.cost import cost_sections
from trial_ray.runs.folder import CONFIG_FILE, RunFolder
from trial_ray.runs.metric_files import read_metrics, read_name
from trial_ray.runs.terminal import say

if TYPE_CHECKING:
    from rich.console import Console

SWEEP_TABLE = "sweep.json"
UNFINISHED = {
    "running": "The {0} has not ended, or was killed.",
    "interrupted": "The {0} was interrupted; `trial-ray {1} --resume` continues it.",
    "failed": "The {0} failed; {2} in its folder says why.",
}
"""Notes on unfinished runs, by state."""
RUN_FILES = (RUN_FILE, CONFIG_FILE, "metrics.jsonl")


def read_runs(folder: Path) -> list[RunRecord]:
    """The run of a run folder, or the trials of a sweep's folder.

    Raises:
        UserInputError: it is neither.
    """
    folder = folder.expanduser().resolve()
    if any((folder / name).is_file() for name in RUN_FILES):
        return [read_run(folder)]
    trials = sorted(path.parent for path in folder.glob(f"*/{RUN_FILE}"))
    if trials or (folder / SWEEP_TABLE).is_file():
        return read_sweep(folder, trials)
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "does not exist"
        raise UserInputError(f"{folder} {found}.{nearest_folder(folder)} Name the folder of a run or of a sweep.")
    empty = "is empty" if not any(folder.iterdir()) else f"has none of {', '.join(RUN_FILES)} or {SWEEP_TABLE}"
    raise UserInputError(f"{folder} is not the folder of a run or of a sweep: it {empty}. Name one.")


def read_run(folder: Path) -> RunRecord:
    """All that was measured of a run; a file that is missing or damaged is named in ``missing``."""
    run = RunRecord(folder)
    _try(run, "metrics.jsonl", lambda: _read_metrics(run))
    _read_config(run)
    about = _json(run, RUN_FILE)
    run.state = str(about.get("state", ""))
    trial = bool(about.get("trial"))
    if run.state in UNFINISHED:
        words = ("trial", "sweep", "error.txt") if trial else ("run", "train", "error.log")
        run.missing.append(UNFINISHED[run.state].format(*words))
    versions = about.get("versions")
    named: dict[str, str] = {
        name: str(about[name]) for name in ("python", "platform", "cores", "started", "updated") if name in about
    }
    run.versions = {**(versions if isinstance(versions, dict) else {}), **run.versions, **named}
    _read_evaluations(run)
    if card := {} if trial else _json(run, "cost.json"):
        _try(run, "cost.json", lambda: _read_cost(run, card))
    if run.hindsight_start is not None:
        _try(run, "", lambda: _read_allocation(run))
    return run


def open_run(
    path: Path, title: str = "", iteration: int | None = None, adapters: Sequence[EnvironmentAdapter] = ()
) -> RunRecord:
    """A run whose trajectories are to be read.

    Args:
        path: the run folder.
        title: what the page calls it.
        iteration: the one to read; ``None``: all.
        adapters: those of the user's that it was played with, which tell the classes of actions.

    Raises:
        CheckpointError: ``path`` is no run folder.
        UserInputError: it recorded no trajectories, or not those of ``iteration``.
    """
    folder = RunFolder.reopen(path)
    recorded = folder.recorded_iterations()
    if not recorded:
        raise UserInputError(f"{folder.path} has recorded no trajectories yet.")
    if iteration is not None and iteration not in recorded:
        raise UserInputError(
            f"{folder.path} recorded no iteration {iteration}; it has {recorded[0]} to {recorded[-1]}."
        )
    run = RunRecord(folder.path, title, recorded=recorded if iteration is None else [iteration])
    _read_config(run, adapters)
    try:
        run.tokens = TokenTexts(load_tokenizer(str(find_tokenizer(folder.path))))
    except TrialRayError as error:
        run.missing.append(f"Prompts and responses are not shown, since no tokenizer decodes them. {error}")
    return run


def _json(run: RunRecord, name: str) -> dict[str, Any]:
    """The object in a file of the run's folder; empty where there is none, which is noted."""
    if not (run.path / name).exists():
        run.missing.append(f"{name} is missing.")
        return {}
    try:
        return read_json(run.path / name)
    except CheckpointError as error:
        run.missing.append(str(error))
        return {}


def _try(run: RunRecord, name: str, read: Callable[[], None]) -> None:
    """Read a part of a run that may be of another version, or changed by hand."""
    try:
        read()
    except TrialRayError as error:
        run.missing.append(str(error))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
        run.missing.append(f"{name} is not what this version writes ({type(error).__name__}: {error}).".lstrip())


def _read_config(run: RunRecord, adapters: Sequence[EnvironmentAdapter] = ()) -> None:
    if record := _json(run, CONFIG_FILE):
        _try(run, CONFIG_FILE, lambda: _apply_config(run, record, adapters))


def _apply_config(run: RunRecord, newest: Mapping[str, Any], adapters: Sequence[EnvironmentAdapter]) -> None:
    """The settings of the newest iteration, and how they differ from earlier ones."""
    commands = commands_in_force(newest)
    run.environments = {
        name: adapter for command in commands for name, adapter in _adapters(command["environments"], adapters).items()
    }
    run.max_staleness = max(int(command["settings"].get("max_staleness") or 0) for command in commands)
    run.changes, run.versions = setting_changes(commands), _versions(commands)
    record = command_of(newest, run.iterations or None)
    settings = dict(record["settings"])
    run.method = method_title(str(record["method"]))
    run.settings, run.seed = settings, settings.get("seed")
    if settings.get("hindsight_coeff"):
        run.hindsight_start = int(settings.get("hindsight_start_iteration", 1))
    run.backbone = backbone_of_settings(settings)


def _adapters(
    described: Sequence[Mapping[str, Any]], own: Sequence[EnvironmentAdapter]
) -> dict[str, EnvironmentAdapter]:
    """Adapters by the name of the run's environment: the user's, or what the run recorded of them, or the package's."""
    found: dict[str, EnvironmentAdapter] = {}
    for each in described:
        env_id, labels = str(each["env_id"]), each.get("labels")
        given = any(adapter.env_id == env_id for adapter in own)
        found[str(each["name"])] = (
            EnvironmentAdapter.from_labels(env_id, labels) if labels and not given else find_adapter(env_id, own)
        )
    return found


def _versions(commands: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Versions of every package over the commands, in order."""
    found: dict[str, list[str]] = {}
    for command in commands:
        for name, version in dict(command.get("versions", {})).items():
            found.setdefault(name, []).append(str(version))
    return {name: ", then ".join(dict.fromkeys(versions)) for name, versions in found.items()}


def _read_metrics(run: RunRecord) -> None:
    run.metrics, damaged = read_metrics(run.path / "metrics.jsonl")
    if damaged:
        several = "s are" if damaged > 1 else " is"
        run.missing.append(f"{damaged} line{several} of metrics.jsonl cut off or damaged, and left out.")
    if not run.metrics:
        run.missing.append("metrics.jsonl holds no iteration.")


def _read_evaluations(run: RunRecord) -> None:
    for path in sorted((run.path / "evaluations").glob("*.json")):
        named = read_name(path)
        if named is None:
            run.missing.append(f"evaluations/{path.name} names no iteration and is left out.")
            continue
        name, iteration = named
        try:
            run.evaluations.setdefault(name, {})[iteration] = EvaluationResult.load(path)
        except UserInputError as error:
            run.missing.append(str(error))


def _read_cost(run: RunRecord, card: Mapping[str, Any]) -> None:
    run.cost = [row for section in cost_sections(card) for row in section]


def _read_allocation(run: RunRecord) -> None:
    """The newest iteration of which training recorded turn weights."""
    training = run.path / "training"
    updates = [number for number, folder in partitions(training).items() if any(folder.glob("*.parquet"))]
    if not updates:
        raise UserInputError("RUN/training was not recorded, so multipliers by class of action are not known.")
    weighed = False
    for update in reversed(updates):
        table = read_training(training, update)
        groups = set(table.filter(pc.is_valid(table["turn_weight"]))["group_id"].to_pylist())
        weighed |= bool(groups)
        found, lost = _trained_in(run, update, groups)
        if traces := [trace for each in found if (trace := _trace(each, run.environments))]:
            run.allocation = Allocation(update, traces)
            if lost:
                run.missing.append(
                    f"Multipliers by class of action lack {lost} group{'' if lost == 1 else 's'} of iteration {update}, whose "
                    "trajectories are not in RUN/trajectories."
                )
            return
    if weighed:
        raise UserInputError(
            "RUN/trajectories holds none of the groups that RUN/training has turn weights of, in the iterations of the updates "
            f"and {run.max_staleness} before them (max_staleness)."
        )
    raise UserInputError(
        "RUN/training holds no turn weights: the method weighs no turns, or trajectories were not recorded."
    )


def _trained_in(run: RunRecord, update: int, groups: set[str]) -> tuple[list[RecordedTrajectory], int]:
    """The trajectories of the groups of an update, the newest first, and how many of the groups were not recorded."""
    found: list[RecordedTrajectory] = []
    recorded = partitions(run.path / "trajectories")
    for number in range(update, max(0, update - run.max_staleness - 1), -1):
        if groups and number in recorded:
            own = [each for each in run.read(number) if each.group_id in groups]
            found += own
            groups = groups - {each.group_id for each in own}
    return found, len(groups)


def _trace(recorded: RecordedTrajectory, adapters: Mapping[str, EnvironmentAdapter]) -> Trace | None:
    """The weights of a trajectory; ``None`` where some of its turns have none."""
    trajectory, turns = recorded.trajectory, []
    for turn, name, row in zip(trajectory.turns, recorded.classes, recorded.trained, strict=True):
        if row is None or row.turn_score is None or row.turn_weight is None:
            return None
        tokens = len(turn.response_ids)
        turns.append(TracedTurn(turn.action, turn.outcome, name, row.turn_score, row.turn_weight, tokens))
    adapter = adapters.get(trajectory.environment)
    family = adapter.labels.family_titles.get(trajectory.family) if adapter else None
    return Trace(trajectory.task_id, family or trajectory.family, trajectory.success, turns) if turns else None


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
        for number, row in enumerate(content.get("trials", [])):
            name = str(row["name"])
            # A trial without a folder of its own keeps its row; its name is never a path.
            path = next((path for path in trials if name in path.name), folder / f"missing-trial-{number}")
            runs.append(_trial(path, row))

    _try(table, SWEEP_TABLE, read)
    known = {run.path for run in runs}
    runs += [_trial(path, {}) for path in trials if path not in known]
    if not runs:
        return [table]
    runs[0].missing += [f"The sweep has no table: {reason}" for reason in table.missing]
    return runs


def _trial(path: Path, row: Mapping[str, Any]) -> RunRecord:
    parameters = dict(row.get("parameters") or {})
    run = read_run(path) if (path / RUN_FILE).is_file() else RunRecord(path)
    run.title, run.parameters = str(row.get("name", "")), parameters
    run.state = str(row.get("status", run.state))
    if isinstance(seed := parameters.get("seed"), int):
        run.seed = seed
    return run


REPORT_FILE = "report.html"


def load_groups(folders: Sequence[Path]) -> list[RunGroup]:
    """The runs of some folders, those that differ by seed alone together.

    Raises:
        UserInputError: one is not the folder of a run or of a sweep, or there is nothing to show in any.
    """
    unique = dict.fromkeys(folder.expanduser().resolve() for folder in folders)
    groups = group_runs([run for folder in unique for run in read_runs(folder)])
    require_something(groups)
    return groups


def write_report(groups: Sequence[RunGroup], title: str, output: Path) -> Path:
    """Write the page; it appears whole or not at all."""
    return write_text(output, report_page(groups, title))


def leave_report(folder: Path, console: Console) -> None:
    """Write the report of a run or sweep that has ended into its folder, and print where it is.

    What it cost to get here must not be lost to a report: a failure is said in a line.
    """
    try:
        path = write_report(load_groups([folder]), folder.name, folder / REPORT_FILE)
    except Exception as error:
        say(console, f"no report was written: {first_line(error)}")
        return
    say(console, f"report: {path}")
