"""Reads run folders for reports and the viewer: metrics, trajectories and training records of finished and running runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from trial_ray.adapters.adapter import EnvironmentAdapter
from trial_ray.adapters.registry import find_adapter
from trial_ray.algorithms.methods import method_title
from trial_ray.errors import TrialRayError, UserInputError
from trial_ray.evaluation.results import EvaluationResult
from trial_ray.files import Json, Numbers, Record, checked_content, nearest_folder, read_json
from trial_ray.models.loading import load_tokenizer
from trial_ray.runs.checkpoints import RUN_FILE, find_tokenizer
from trial_ray.runs.config_record import SettingChange, backbone_of_settings, command_of, load_commands, setting_changes
from trial_ray.runs.cost import cost_sections
from trial_ray.runs.evaluations import read_name
from trial_ray.runs.folder import CONFIG_FILE, RunFolder
from trial_ray.runs.metrics_file import read_metrics
from trial_ray.runs.recorded_trajectory import RecordedTrajectory, TokenTexts, read_recorded

SWEEP_TABLE = "sweep.json"
UNFINISHED = {
    "running": "The {0} has not ended, or was killed.",
    "interrupted": "The {0} was interrupted; {1} continues it.",
    "failed": "The {0} failed; {2} in its folder has the cause.",
}
"""Notes on runs that have not finished, by the state in ``run.json``."""
RUN_FILES = (RUN_FILE, CONFIG_FILE, "metrics.jsonl")
PARTS = ("table", "metrics", "config", "about", "evaluations", "cost", "allocation")
"""Parts of a run in the order in which a report lists missing data: ``table`` is the table of the run's sweep, and all other
parts are attributes of :class:`RecordedRun`."""

T = TypeVar("T")


@dataclass(frozen=True)
class RunConfig:
    """Recorded config of a run; the defaults are for a run without a recorded config.

    Attributes:
        method: the method's title.
        backbone: name of the initial policy.
        settings: values of all settings in the newest iteration.
        changes: changes of settings during the run, in order.
        environments: environment adapters of the run, by the environment's name in metrics and records. Adapters that the
            caller did not pass are created from the report labels (titles and classes of actions) that the run recorded, if any.
        max_staleness: maximum number of updates between the recording of a rollout and training on it.
        versions: versions of packages.
    """

    method: str = ""
    backbone: str = ""
    settings: Record = field(default_factory=dict)
    changes: Sequence[SettingChange] = ()
    environments: Mapping[str, EnvironmentAdapter] = field(default_factory=dict)
    max_staleness: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def hindsight_start(self) -> int | None:
        """First iteration with the dense hindsight loss; ``None`` for methods without this loss."""
        return int(self.settings.get("hindsight_start_iteration", 1)) if self.settings.get("hindsight_coeff") else None


class RecordedRun:
    """Recorded data of a run or of a sweep's trial; each attribute is read from its file at the first access.

    The value for a missing or damaged file is empty, and :meth:`reasons` returns the reason.

    Args:
        path: folder of the run.
        title: name of the run; if empty, the name of its folder is used.
        row: for a trial, its row in the sweep's table; ``None`` for other runs.
        adapters: the user's own environment adapters of the run. For the run's other environments, adapters are created from the
            report labels that the run recorded; without recorded labels, this package's adapters or default values are used.
    """

    def __init__(
        self,
        path: Path,
        title: str = "",
        row: Record | None = None,
        adapters: Sequence[EnvironmentAdapter] = (),
    ) -> None:
        self.path = path
        self._folder = RunFolder(path)
        self.name = title or path.name
        self._row: Record = row or {}
        self._adapters = adapters
        self._reasons: dict[str, list[str]] = {}
        self.parameters: Record = dict(self._row.get("parameters") or {})

    # -- parts -----------------------------------------------------------------------------------------------------

    @cached_property
    def metrics(self) -> Sequence[Numbers]:
        """Flat metrics, one mapping per iteration, in order."""
        lines, damaged = self._read("metrics", "metrics.jsonl", read_metrics) or ([], 0)
        if damaged:
            subject = "lines of metrics.jsonl are" if damaged > 1 else "line of metrics.jsonl is"
            self._note("metrics", f"{damaged} {subject} cut off or damaged, and skipped.")
        if not lines and not self._reasons.get("metrics"):
            self._note("metrics", "metrics.jsonl has no iteration.")
        return lines

    @cached_property
    def config(self) -> RunConfig:
        """Config of the run; if it continued with another config, the config of the newest iteration."""
        return self._read("config", CONFIG_FILE, self._config_of) or RunConfig()

    @cached_property
    def about(self) -> Record:
        """Content of ``run.json``: state, versions, machine, times."""
        about = self._read("about", RUN_FILE, read_json) or {}
        if (state := str(about.get("state", ""))) in UNFINISHED:
            words = ("run", "`trial-ray train FILE --resume RUN`", "error.log")
            if about.get("trial"):
                words = ("trial", "the same command, for a sweep with `--resume DIR`,", "error.txt")
            self._note("about", UNFINISHED[state].format(*words))
        return about

    @cached_property
    def evaluations(self) -> dict[str, dict[int, EvaluationResult]]:
        """Evaluations by environment (``""`` if there is one evaluation set), and by iterations trained (0: before training)."""
        evaluations: dict[str, dict[int, EvaluationResult]] = {}
        for path in sorted(self._folder.evaluations.glob("*.json")):
            if (name := read_name(path)) is None:
                self._note("evaluations", f"evaluations/{path.name} names no iteration and is skipped.")
            elif result := self._read("evaluations", f"evaluations/{path.name}", EvaluationResult.load):
                environment, iteration = name
                evaluations.setdefault(environment, {})[iteration] = result
        return evaluations

    @cached_property
    def cost(self) -> Sequence[Sequence[str]]:
        """Rows of the cost table from ``cost.json``: label, value and share of the run's time; empty for a trial."""
        if self.about.get("trial"):
            return []
        sections = self._read("cost", "cost.json", lambda path: cost_sections(read_json(path)))
        return [row for section in sections or () for row in section]

    @cached_property
    def allocation(self) -> Sequence[RecordedTrajectory]:
        """Trajectories with turn weights of the newest iteration that recorded turn weights.

        As in the TRIAL paper's Figure 3, only successful trajectories are returned; if none succeeded, all are returned.
        """
        has_weights = self.config.hindsight_start is not None
        return (self._read("allocation", "training", self._newest_with_weights) if has_weights else None) or []

    @cached_property
    def recorded(self) -> list[int]:
        """Iterations with recorded trajectories."""
        return self._folder.recorded_iterations()

    @cached_property
    def tokens(self) -> TokenTexts | None:
        """Decoder of the run's tokens; ``None`` if the run has no tokenizer yet."""
        try:
            # Episodes of an evaluation have no token ids if a chat API, the walkthrough oracle or an expert played them.
            recording = self.about.get("recording")
            model = self.config.settings.get("model_path") if recording else find_tokenizer(self.path)
            return TokenTexts(load_tokenizer(model)) if model else None
        except TrialRayError as error:
            self._note("tokens", f"Prompts and responses are not shown, since no tokenizer decodes them. {error}")
            return None

    def read(self, iteration: int) -> list[RecordedTrajectory]:
        """Read the recorded trajectories of one iteration; this raises the same errors as :func:`read_recorded`."""
        return read_recorded(self._folder, iteration, self.config.max_staleness, self.config.environments)

    # -- values derived from the parts --------------------------------------------------------------------------------------

    @property
    def settings(self) -> Json:
        """Settings of the run; for a trial, they include the values that the sweep chose."""
        return {**self.config.settings, **self.parameters}

    @property
    def seed(self) -> int | None:
        """Seed of the run; ``None`` if it is not recorded."""
        seed = self.settings.get("seed")
        return seed if isinstance(seed, int) else None

    @property
    def state(self) -> str:
        """State of the run: ``done``, ``running``, ``interrupted`` or ``failed``; empty if it is not recorded."""
        return str(self._row.get("status", self.about.get("state", "")))

    @property
    def versions(self) -> dict[str, str]:
        """Versions of packages, Python and platform, number of cores, and when the run started and ``run.json`` last changed."""
        names = ("python", "platform", "cores", "started", "updated")
        packages = self.about.get("versions")
        machine = {name: str(self.about[name]) for name in names if name in self.about}
        return {**(packages if isinstance(packages, dict) else {}), **self.config.versions, **machine}

    @property
    def iterations(self) -> int:
        """Number of iterations trained, according to metrics and evaluations."""
        evaluated = (iteration for played in self.evaluations.values() for iteration in played)
        return max((*(int(line["iteration"]) for line in self.metrics), *evaluated), default=0)

    @property
    def before(self) -> dict[str, EvaluationResult]:
        """Evaluations before training, by environment."""
        return {name: played[0] for name, played in self.evaluations.items() if 0 in played}

    @property
    def after(self) -> dict[str, EvaluationResult]:
        """Newest evaluations of the trained policy, by environment; :meth:`evaluated_after` returns their iteration."""
        return {name: played[max(played)] for name, played in self.evaluations.items() if max(played)}

    def evaluated_after(self, name: str) -> int:
        """Return the number of iterations trained before the newest evaluation in an environment; 0 before training."""
        return max(self.evaluations[name])

    def reasons(self, *parts: str) -> list[str]:
        """Return the reasons, as sentences, why ``parts`` (default: :data:`PARTS`) are missing or incomplete."""
        parts = parts or PARTS
        for part in parts if self.path.is_dir() else ():
            getattr(self, part, None)
        return [reason for part in parts for reason in self._reasons.get(part, ())]

    # -- reading -----------------------------------------------------------------------------------------------------

    def _note(self, part: str, reason: str) -> None:
        self._reasons.setdefault(part, []).append(reason)

    def _read(self, part: str, name: str, read: Callable[[Path], T]) -> T | None:
        """Return a file's content; if it is missing or unreadable, return ``None`` and store the reason under the key ``part``."""
        path = self.path / name
        if not path.exists():
            self._note(part, f"{name} is missing.")
            return None
        try:
            with checked_content(path):
                return read(path)
        except TrialRayError as error:
            self._note(part, str(error))
            return None

    def _config_of(self, path: Path) -> RunConfig:
        commands = load_commands(path)
        record = command_of(commands, self.iterations or None)
        settings = record["settings"]
        versions: dict[str, list[str]] = {}
        for command in commands:
            for name, version in dict(command.get("versions", {})).items():
                versions.setdefault(name, []).append(str(version))
        return RunConfig(
            method=method_title(str(record["method"])),
            backbone=backbone_of_settings(settings),
            settings=settings,
            changes=setting_changes(commands),
            environments={
                str(described["name"]): self._adapter_of(described)
                for command in commands
                for described in command["environments"]
            },
            max_staleness=max(int(command["settings"].get("max_staleness") or 0) for command in commands),
            versions={name: ", then ".join(dict.fromkeys(used)) for name, used in versions.items()},
        )

    def _adapter_of(self, described: Record) -> EnvironmentAdapter:
        """Return the user's environment adapter; else one with the report labels that the run recorded; else the package's."""
        env_id, labels = str(described["env_id"]), described.get("labels")
        if labels and not any(adapter.env_id == env_id for adapter in self._adapters):
            return EnvironmentAdapter.from_labels(env_id, labels)
        return find_adapter(env_id, self._adapters)

    def _newest_with_weights(self, training: Path) -> list[RecordedTrajectory]:
        updates = self._folder.trained_iterations()
        if not updates:
            raise UserInputError(f"{training} has no turns, so multipliers by class of action are unknown.")
        for iteration in reversed(self.recorded):
            last = iteration + self.config.max_staleness
            if any(iteration <= update <= last for update in updates):
                weighed = [recorded for recorded in self.read(iteration) if recorded.has_turn_weights]
                if weighed:
                    return [recorded for recorded in weighed if recorded.trajectory.success] or weighed
        raise UserInputError(f"{self.path / 'trajectories'} has none of the groups with turn weights in {training}.")


def read_runs(folder: Path) -> list[RecordedRun]:
    """Read the run in a run folder, or the trials in a sweep's folder.

    Raises:
        UserInputError: the folder is neither a run folder nor a sweep's folder.
    """
    folder = folder.expanduser().resolve()
    if any((folder / name).is_file() for name in RUN_FILES):
        return [RecordedRun(folder)]
    trials = sorted(path.parent for path in folder.glob(f"*/{RUN_FILE}"))
    if trials or (folder / SWEEP_TABLE).is_file():
        return _trials(folder, trials)
    if not folder.is_dir():
        reason = "is a file" if folder.exists() else "does not exist"
        raise UserInputError(f"{folder} {reason}.{nearest_folder(folder)} Name the folder of a run or of a sweep.")
    empty = "is empty" if not any(folder.iterdir()) else f"has none of {', '.join(RUN_FILES)} or {SWEEP_TABLE}"
    raise UserInputError(f"{folder} is not the folder of a run or of a sweep: it {empty}. Name one.")


def _trials(folder: Path, trials: list[Path]) -> list[RecordedRun]:
    """Return the trials of a sweep, in the order of its table if it has one."""
    table = RecordedRun(folder)

    def read(path: Path) -> list[RecordedRun]:
        runs, rows = [], read_json(path)["trials"]
        by_name = {trial.name: trial for trial in trials}
        names = {str(row["name"]) for row in rows}
        for number, row in enumerate(rows):
            name = str(row["name"])
            # If no folder has the trial's name, use a folder whose name contains it and is not the name of another trial.
            matches = (trial for trial in trials if name in trial.name and trial.name not in names)
            # A name from the table is never used as a path; a trial without a folder is shown with its row only.
            own = by_name.get(name) or next(matches, folder / f"missing-trial-{number}")
            runs.append(RecordedRun(own, name, row))
        return runs

    runs = table._read("table", SWEEP_TABLE, read) or []
    known = {run.path for run in runs}
    runs += [RecordedRun(path) for path in trials if path not in known]
    for reason in table.reasons("table") if runs else ():
        runs[0]._note("table", f"The sweep has no table: {reason}")
    return runs or [table]


def open_run(
    path: Path, title: str = "", iteration: int | None = None, adapters: Sequence[EnvironmentAdapter] = ()
) -> RecordedRun:
    """Open a run for reading its trajectories.

    Args:
        path: the run folder.
        title: name of the run; if empty, the name of its folder is used.
        iteration: the only iteration to read, or ``None`` to read all.
        adapters: the user's own environment adapters of the run; they determine the classes of actions.

    Raises:
        CheckpointError: ``path`` is not a run folder.
        UserInputError: the run recorded no trajectories, or no trajectories of ``iteration``.
    """
    run = RecordedRun(RunFolder.reopen(path).path, title, adapters=adapters)
    if not run.recorded:
        raise UserInputError(f"{run.path} has recorded no trajectories yet.")
    if iteration is not None:
        if iteration not in run.recorded:
            raise UserInputError(
                f"{run.path} recorded no iteration {iteration}; it has {run.recorded[0]} to {run.recorded[-1]}."
            )
        run.recorded = [iteration]
    return run
