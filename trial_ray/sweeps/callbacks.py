"""Tune callbacks of a sweep: its stop criteria, and what is done with the results and checkpoints of its trials.

Ray Tune pickles the callbacks into the sweep's folder and loads them when the sweep continues, so they have only plain values.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.stopper import Stopper

from trial_ray.algorithms.grpo import GRPOConfig
from trial_ray.engines.pool import FAULTS
from trial_ray.ray_internals import checkpoints_of
from trial_ray.runs.config_record import to_record
from trial_ray.runs.experiment import reached
from trial_ray.runs.folder import RunFolder
from trial_ray.runs.metrics_file import check_reported, flatten
from trial_ray.runs.terminal import describe, show
from trial_ray.runs.trackers import DONE, FAILED, INTERRUPTED, TrackedRun, Trackers, identifier


@dataclass(eq=False)
class StopCriteria(Stopper):
    """Stops trials at the sweep's criteria.

    The first result must contain the metric and the keys of ``stop``, except evaluation metrics, which may come later. Tune itself
    would never stop a trial at a key that is not reported.

    Attributes:
        stop: a trial ends when any of these metrics reaches its value.
        metric: metric of the sweep.
        checked: whether the first result has been checked.
    """

    stop: dict[str, float]
    metric: str
    checked: bool = field(default=False, init=False)

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Return True if the trial ends with this result.

        Raises:
            ConfigError: a metric is not reported.
        """
        if not self.checked:
            check_reported(self.metric, "metric", result)
            for name in self.stop:
                check_reported(name, "a key of stop", result)
            self.checked = True
        return reached(self.stop, flatten(result))

    def stop_all(self) -> bool:
        """Return False: each trial is stopped separately."""
        return False


@dataclass(eq=False)
class TrialCallback(tune.Callback):
    """Prints the progress of the trials, makes their folders run folders, and logs trials to tracking services.

    It also removes checkpoints that no trial of population-based training needs. A trial that copies another trial starts from
    the checkpoint that the other wrote at its last perturbation. Tune limits the number of checkpoints of each trial separately,
    and could remove this checkpoint before it is read.

    Attributes:
        command: command line of the sweep, which every run folder records.
        log_to: tracking services; all trials are logged as runs of one group.
        group: name of the group; also the prefix of the runs' names and keys.
        kept: number of newest checkpoints that each trial keeps, enough for the time since its last perturbation; ``None``
            leaves all checkpoints to Tune.
        resumed: whether the sweep was continued.
    """

    command: Sequence[str]
    log_to: Sequence[str]
    group: str
    kept: int | None
    resumed: bool = field(default=False, init=False)
    _open: dict[str, tuple[RunFolder, Trackers]] = field(default_factory=dict, init=False)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without open folders and connections, which the continued sweep opens again."""
        return {**vars(self), "resumed": True, "_open": {}}

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Open the run folder and the trackers of a trial that starts, or that continues, possibly with other settings."""
        config: GRPOConfig = trial.get_trainable_cls().get_default_config().update_from_dict(trial.config)
        folder = RunFolder.of_trial(Path(trial.path), config, self.command)
        before = trial.latest_checkpoint_result
        folder.drop_records_after(int(before.metrics["training_iteration"]) if before else 0)
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
            trackers = Trackers(self.log_to, run, show)
        self._open[trial.trial_id] = folder, trackers

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """Print and log the result of an iteration."""
        metrics = flatten(result)
        show(f"{trial_name(trial)}  iteration {result['training_iteration']}  {describe(metrics)}")
        if FAULTS in result:
            show(f"{trial_name(trial)}  {result[FAULTS]}")
        for log in self._open[trial.trial_id]:
            log.log(int(result["training_iteration"]), metrics)

    def on_checkpoint(self, iteration: int, trials: list[Any], trial: Any, checkpoint: Any, **info: Any) -> None:
        """Link a new checkpoint into the trial's run folder, and remove the trial's checkpoints that are no longer needed."""
        after = int(trial.last_result["training_iteration"])
        self._open[trial.trial_id][0].link_checkpoint(after, Path(checkpoint.path))
        if self.kept is None:
            return
        # member.checkpoint is the checkpoint from which a trial starts next: its own, or that of a trial that it will copy.
        needed = {str(member.checkpoint.path) for member in trials if member.checkpoint}
        for result in checkpoints_of(trial)[: -self.kept]:
            path = str(result.checkpoint.path)
            if path not in needed:
                shutil.rmtree(Path(path), ignore_errors=True)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Record in the trial's folder and trackers that the trial is done, and close them."""
        self._close(trial.trial_id, DONE)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Print and record in the trial's folder and trackers that the trial failed, and close them."""
        show(f"{trial_name(trial)}  failed")
        self._close(trial.trial_id, FAILED)

    def on_experiment_end(self, trials: list[Any], **info: Any) -> None:
        """Record that the trials that are still running were interrupted, and close their folders and trackers."""
        for trial_id in list(self._open):
            self._close(trial_id, INTERRUPTED)

    def _close(self, trial_id: str, state: str) -> None:
        if trial_id in self._open:
            folder, trackers = self._open.pop(trial_id)
            folder.set_state(state)
            trackers.close(state)


def trial_name(trial: Any) -> str:
    """Return a trial's custom name, or else Tune's id."""
    return str(trial.custom_trial_name or trial.trial_id)
