"""Run folders for reports and the viewer: metrics, trajectories and training records, of finished and running runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from trial_ray.adapters.adapter import EnvironmentAdapter
from trial_ray.adapters.registry import find_adapter
from trial_ray.algorithms.methods import method_title
from trial_ray.errors import TrialRayError, UserInputError
from trial_ray.evaluation.results import EvaluationResult
from trial_ray.files import nearest_folder, read_json
from trial_ray.models.loading import load_tokenizer
from trial_ray.runs.checkpoints import RUN_FILE, find_tokenizer
from trial_ray.runs.config_record import (
    SettingChange,
    backbone_of_settings,
    command_of,
    commands_in_force,
    setting_changes,
)
from trial_ray.runs.cost import cost_sections
from trial_ray.runs.folder import CONFIG_FILE, RunFolder
from trial_ray.runs.metric_files import read_metrics, read_name
from trial_ray.runs.recorded_trajectory import RecordedTrajectory, TokenTexts, read_recorded, trained_iterations

SWEEP_TABLE = "sweep.json"
UNFINISHED = {
    "running": "The {0} has not ended, or was killed.",
    "interrupted": "The {0} was interrupted; {1} continues it.",
    "failed": "The {0} failed; {2} in its folder has the cause.",
}
"""Notes on unfinished runs, by state."""
RUN_FILES = (RUN_FILE, CONFIG_FILE, "metrics.jsonl")
PARTS = ("table", "metrics", "config", "about", "evaluations", "cost", "allocation")
"""Parts of a run, the table of its sweep first, in the order in which a report lists missing parts."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Recorded config of a run; the defaults are for a run without a recorded config.

    Attributes:
        method: the method's title.
        backbone: name of the initial policy.
        settings: every setting, as in the newest iteration.
        changes: settings that had other values in earlier iterations, in order.
        environments: adapters of the run's environments, by the name in its metrics and records; an adapter of the user is
            restored from the run's records.
        max_staleness: maximum number of updates between the recording of a rollout and training on it.
        versions: versions of packages.
    """

    method: str = ""
    backbone: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    changes: Sequence[SettingChange] = ()
    environments: Mapping[str, EnvironmentAdapter] = field(default_factory=dict)
    max_staleness: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def hindsight_start(self) -> int | None:
        """First iteration with the dense loss; ``None`` for methods without it."""
        return int(self.settings.get("hindsight_start_iteration", 1)) if self.settings.get("hindsight_coeff") else None


class RecordedRun:
    """A run, or a trial of a sweep; each part is read once, at its first access.

    A part that is missing or damaged is empty, and :meth:`reasons` gives the reason.

    Args:
        path: folder of the run.
        title: name of the run; empty: the name of its folder.
        row: for a trial, its row in the sweep's table.
        adapters: adapters of the user with which the run was played; others are restored from the run's records.
    """

    def __init__(
        self,
        path: Path,
        title: str = "",
        row: Mapping[str, Any] | None = None,
        adapters: Sequence[EnvironmentAdapter] = (),
    ) -> None:
        self.path = path
        self.name = title or path.name
        self._row: Mapping[str, Any] = row or {}
        self._adapters = adapters
        self._reasons: dict[str, list[str]] = {}
        self.parameters: Mapping[str, Any] = dict(self._row.get("parameters") or {})

    # -- parts -----------------------------------------------------------------------------------------------------

    @cached_property
    def metrics(self) -> Sequence[Mapping[str, float]]:
        """Flat metrics, one mapping per iteration, in order."""
        lines, damaged = self._read("metrics", "metrics.jsonl", read_metrics) or ([], 0)
        if damaged:
            lines_are = "lines of metrics.jsonl are" if damaged > 1 else "line of metrics.jsonl is"
            self._say("metrics", f"{damaged} {lines_are} cut off or damaged, and skipped.")
        if not lines and not self._reasons.get("metrics"):
            self._say("metrics", "metrics.jsonl has no iteration.")
        return lines

    @cached_property
    def config(self) -> RunConfig:
        """Config of the run; if it continued with another config, the config of the newest iteration."""
        return self._read("config", CONFIG_FILE, self._config_of) or RunConfig()

    @cached_property
    def about(self) -> Mapping[str, Any]:
        """Content of ``run.json``: state, versions, machine, times."""
        found = self._read("about", RUN_FILE, read_json) or {}
        if (state := str(found.get("state", ""))) in UNFINISHED:
            words = ("run", "`trial-ray train FILE --resume RUN`", "error.log")
            if found.get("trial"):
                words = ("trial", "the same command, for a sweep with `--resume DIR`,", "error.txt")
            self._say("about", UNFINISHED[state].format(*words))
        return found

    @cached_property
    def evaluations(self) -> dict[str, dict[int, EvaluationResult]]:
        """Evaluations by environment (``""`` if the run has a single one), and by the iterations trained (0 before training)."""
        found: dict[str, dict[int, EvaluationResult]] = {}
        for path in sorted((self.path / "evaluations").glob("*.json")):
            if (named := read_name(path)) is None:
                self._say("evaluations", f"evaluations/{path.name} names no iteration and is skipped.")
            elif result := self._read("evaluations", f"evaluations/{path.name}", EvaluationResult.load):
                found.setdefault(named[0], {})[named[1]] = result
        return found

    @cached_property
    def cost(self) -> Sequence[Sequence[str]]:
        """Rows of the cost card: label, value and share of the run's time; empty for a trial."""
        if self.about.get("trial"):
            return []
        sections = self._read("cost", "cost.json", lambda path: cost_sections(read_json(path)))
        return [row for section in sections or () for row in section]

    @cached_property
    def allocation(self) -> Sequence[RecordedTrajectory]:
        """Trajectories with turn weights of the newest recorded iteration that has any.

        Only the successful trajectories are returned, as in the paper's Figure 3; if none succeeded, all.
        """
        weighs = self.config.hindsight_start is not None
        return (self._read("allocation", "training", self._newest_weighed) if weighs else None) or []

    @cached_property
    def recorded(self) -> list[int]:
        """Iterations with recorded trajectories."""
        return RunFolder(self.path).recorded_iterations()

    @cached_property
    def tokens(self) -> TokenTexts | None:
        """Texts of the run's tokens; ``None`` if it has no tokenizer yet."""
        try:
            return TokenTexts(load_tokenizer(str(find_tokenizer(self.path))))
        except TrialRayError as error:
            self._say("tokens", f"Prompts and responses are not shown, since no tokenizer decodes them. {error}")
            return None

    def read(self, iteration: int) -> list[RecordedTrajectory]:
        """Read the recorded trajectories of one iteration; raises the same errors as :func:`read_recorded`."""
        return read_recorded(self.path, iteration, self.config.max_staleness, self.config.environments)

    # -- what follows from them --------------------------------------------------------------------------------------

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the config, with the values that its sweep chose."""
        return {**self.config.settings, **self.parameters}

    @property
    def seed(self) -> int | None:
        """Seed of the run; ``None`` if it is not recorded."""
        seed = self.settings.get("seed")
        return seed if isinstance(seed, int) else None

    @property
    def state(self) -> str:
        """``done``, ``running``, ``interrupted`` or ``failed``; empty if it is not recorded."""
        return str(self._row.get("status", self.about.get("state", "")))

    @property
    def versions(self) -> dict[str, str]:
        """Versions of packages, Python and platform, number of cores, and times of the start and of the last update."""
        named = ("python", "platform", "cores", "started", "updated")
        packages = self.about.get("versions")
        found = {**(packages if isinstance(packages, dict) else {}), **self.config.versions}
        return {**found, **{name: str(self.about[name]) for name in named if name in self.about}}

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
        """Iterations trained before the newest evaluation in an environment; 0 before training."""
        return max(self.evaluations[name])

    def reasons(self, *parts: str) -> list[str]:
        """Sentences about parts that could not be read, with the reason; by default about all parts that a report shows."""
        parts = parts or PARTS
        for part in parts if self.path.is_dir() else ():
            getattr(self, part, None)
        return [reason for part in parts for reason in self._reasons.get(part, ())]

    # -- reading -----------------------------------------------------------------------------------------------------

    def _say(self, part: str, reason: str) -> None:
        self._reasons.setdefault(part, []).append(reason)

    def _read(self, part: str, name: str, read: Callable[[Path], T]) -> T | None:
        """Read a file that may be of another version or edited by hand; ``None`` if it cannot be read, which is noted."""
        path = self.path / name
        try:
            if path.exists():
                return read(path)
            self._say(part, f"{name} is missing.")
        except TrialRayError as error:
            self._say(part, str(error))
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
            self._say(part, f"{name} is not in the format of this version ({type(error).__name__}: {error}).")
        return None

    def _config_of(self, path: Path) -> RunConfig:
        newest = read_json(path)
        commands = commands_in_force(newest)
        record = command_of(newest, self.iterations or None)
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
                str(each["name"]): self._adapter_of(each) for command in commands for each in command["environments"]
            },
            max_staleness=max(int(command["settings"].get("max_staleness") or 0) for command in commands),
            versions={name: ", then ".join(dict.fromkeys(each)) for name, each in versions.items()},
        )

    def _adapter_of(self, described: Mapping[str, Any]) -> EnvironmentAdapter:
        """Return the user's adapter, or an adapter from the run's record, or the package's."""
        env_id, labels = str(described["env_id"]), described.get("labels")
        if labels and not any(adapter.env_id == env_id for adapter in self._adapters):
            return EnvironmentAdapter.from_labels(env_id, labels)
        return find_adapter(env_id, self._adapters)

    def _newest_weighed(self, training: Path) -> list[RecordedTrajectory]:
        updates = trained_iterations(self.path)
        if not updates:
            raise UserInputError(f"{training} has no turns, so multipliers by class of action are unknown.")
        for iteration in reversed(self.recorded):
            last = iteration + self.config.max_staleness
            if any(iteration <= update <= last for update in updates):
                found = [each for each in self.read(iteration) if each.weighed]
                if found:
                    return [each for each in found if each.trajectory.success] or found
        raise UserInputError(f"{self.path / 'trajectories'} has none of the groups with turn weights in {training}.")


def read_runs(folder: Path) -> list[RecordedRun]:
    """Read the run of a run folder, or the trials of a sweep's folder.

    Raises:
        UserInputError: the folder is neither.
    """
    folder = folder.expanduser().resolve()
    if any((folder / name).is_file() for name in RUN_FILES):
        return [RecordedRun(folder)]
    trials = sorted(path.parent for path in folder.glob(f"*/{RUN_FILE}"))
    if trials or (folder / SWEEP_TABLE).is_file():
        return _trials(folder, trials)
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "does not exist"
        raise UserInputError(f"{folder} {found}.{nearest_folder(folder)} Name the folder of a run or of a sweep.")
    empty = "is empty" if not any(folder.iterdir()) else f"has none of {', '.join(RUN_FILES)} or {SWEEP_TABLE}"
    raise UserInputError(f"{folder} is not the folder of a run or of a sweep: it {empty}. Name one.")


def _trials(folder: Path, trials: list[Path]) -> list[RecordedRun]:
    """The trials of a sweep, in the order of its table where it has one."""
    table = RecordedRun(folder)

    def read(path: Path) -> list[RecordedRun]:
        runs, rows = [], read_json(path)["trials"]
        by_name = {trial.name: trial for trial in trials}
        named = {str(row["name"]) for row in rows}
        for number, row in enumerate(rows):
            name = str(row["name"])
            # The id of a trial is a part of the folder's name, as a shorter name of another trial may be.
            parts = (trial for trial in trials if name in trial.name and trial.name not in named)
            # A trial without a folder of its own keeps its row; its name is never a path.
            own = by_name.get(name) or next(parts, folder / f"missing-trial-{number}")
            runs.append(RecordedRun(own, name, row))
        return runs

    runs = table._read("table", SWEEP_TABLE, read) or []
    known = {run.path for run in runs}
    runs += [RecordedRun(path) for path in trials if path not in known]
    for reason in table.reasons("table") if runs else ():
        runs[0]._say("table", f"The sweep has no table: {reason}")
    return runs or [table]


def open_run(
    path: Path, title: str = "", iteration: int | None = None, adapters: Sequence[EnvironmentAdapter] = ()
) -> RecordedRun:
    """Open a run for reading its trajectories.

    Args:
        path: the run folder.
        title: name of the run in the page.
        iteration: iteration to read; ``None``: all.
        adapters: adapters of the user with which the run was played; they determine the classes of actions.

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
