"""Tune callbacks of a sweep: progress, run folders, checkpoints of a population, metric checks.

Ray Tune stores these objects beside the sweep and loads them when it continues, so they hold plain values only.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.stopper import Stopper
from rich import get_console

from trial_ray.algorithms.config import GRPOConfig
from trial_ray.engines.fault_log import FAULTS
from trial_ray.ray_internals import checkpoints_of
from trial_ray.runs.config_record import to_record
from trial_ray.runs.experiment import reached
from trial_ray.runs.folder import RunFolder
from trial_ray.runs.metric_files import check_reported, flatten
from trial_ray.runs.terminal import describe, say
from trial_ray.runs.trackers import DONE, FAILED, INTERRUPTED, TrackedRun, Trackers, identifier


class SweepReporter(tune.Callback):
    """Prints as trials progress."""

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """A trial finished an iteration."""
        _print(f"{trial_name(trial)}  iteration {result['training_iteration']}  {describe(flatten(result))}")
        if FAULTS in result:
            _print(f"{trial_name(trial)}  {result[FAULTS]}")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A trial failed."""
        _print(f"{trial_name(trial)}  failed")


class StopCriteria(Stopper):
    """Ends trials at the sweep's criteria; refuses names that the first result does not hold, which Tune would only wait for.

    Args:
        stop: a trial ends when one of these metrics reaches its value.
        metric: of the sweep.
    """

    def __init__(self, stop: dict[str, float], metric: str) -> None:
        self.stop = stop
        self.metric = metric
        self.checked = False

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Whether the trial ends with this result.

        Raises:
            ConfigError: a metric is not among those reported.
        """
        if not self.checked:
            check_reported(self.metric, "metric", result)
            for name in self.stop:
                check_reported(name, "a key of stop", result)
            self.checked = True
        return reached(self.stop, flatten(result))

    def stop_all(self) -> bool:
        """Never: each trial ends by itself."""
        return False


class TrialFolders(tune.Callback):
    """Makes the folder of every trial a run folder, which all commands open that open a run, and logs it to services.

    Args:
        command: of the sweep, for the record.
        log_to: services, at which trials are runs of one group.
        group: of these runs; also the beginning of what identifies them.
    """

    def __init__(self, command: Sequence[str], log_to: Sequence[str], group: str) -> None:
        self.command = list(command)
        self.log_to = tuple(log_to)
        self.group = group
        self.resumed = False
        self._open: dict[str, tuple[RunFolder, Trackers]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Folders and connections are opened again by the sweep that continues."""
        return {**vars(self), "resumed": True, "_open": {}}

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A trial begins, or goes on after a pause, perhaps with other settings."""
        config: GRPOConfig = trial.get_trainable_cls().get_default_config().update_from_dict(trial.config)
        folder = RunFolder.of_trial(Path(trial.path), config, self.command)
        if trial.trial_id in self._open:
            trackers = self._open[trial.trial_id][1]
        else:
            run = TrackedRun(
                name=f"{self.group}-{trial_name(trial)}",
                key=identifier(f"{self.group}-{trial.trial_id}"),
                settings=to_record(config),
                folder=folder.path,
                group=self.group,
                resumed=self.resumed,
            )
            trackers = Trackers(self.log_to, run, _print)
        self._open[trial.trial_id] = folder, trackers

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """A trial finished an iteration."""
        for log in self._open[trial.trial_id]:
            log.log(int(result["training_iteration"]), flatten(result))

    def on_checkpoint(self, iteration: int, trials: list[Any], trial: Any, checkpoint: Any, **info: Any) -> None:
        """A trial wrote a checkpoint."""
        after = int(trial.last_result["training_iteration"])
        self._open[trial.trial_id][0].link_checkpoint(after, Path(checkpoint.path))

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A trial came to its end."""
        self._close(trial.trial_id, DONE)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A trial failed."""
        self._close(trial.trial_id, FAILED)

    def on_experiment_end(self, trials: list[Any], **info: Any) -> None:
        """The sweep ends; what runs still was interrupted."""
        for trial_id in list(self._open):
            self._close(trial_id, INTERRUPTED)

    def _close(self, trial_id: str, state: str) -> None:
        if trial_id in self._open:
            folder, trackers = self._open.pop(trial_id)
            folder.set_state(state)
            trackers.close(state)


class PopulationCheckpoints(tune.Callback):
    """Removes checkpoints that no member of a population can need any more.

    A member that copies another starts from the checkpoint that the other wrote at its last perturbation. Tune's own limit
    counts each trial's checkpoints alone: the copied one could be gone before it was read.

    Args:
        kept: newest checkpoints of its own that a trial keeps: those since its last perturbation.
    """

    def __init__(self, kept: int) -> None:
        self.kept = kept

    def on_checkpoint(self, iteration: int, trials: list[Any], trial: Any, checkpoint: Any, **info: Any) -> None:
        """A trial wrote a checkpoint."""
        # What a trial would start from next; of one that is about to copy another, the other's.
        needed = {str(each.checkpoint.path) for each in trials if each.checkpoint}
        written = checkpoints_of(trial)
        for result in written[: -self.kept]:
            path = str(result.checkpoint.path)
            if path not in needed:
                shutil.rmtree(Path(path), ignore_errors=True)
                written.remove(result)


def trial_name(trial: Any) -> str:
    """Name of a trial, else Tune's id."""
    return str(trial.custom_trial_name or trial.trial_id)


def _print(line: str) -> None:
    # Looked up now: Tune stores the callback, and no console can be stored.
    say(get_console(), line)
