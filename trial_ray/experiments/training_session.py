"""One training run: panel before, iterations with metrics and checkpoints, panel after, summary."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trial_ray.algorithms.methods import method_of
from trial_ray.errors import (
    InfrastructureError,
    PolicyBrokenError,
    TrainingDivergedError,
    is_user_error,
    root_cause,
)
from trial_ray.evaluation.comparison import PairedComparison, paired_comparison
from trial_ray.evaluation.results import EvaluationResult
from trial_ray.experiments.checkpoint_writer import CheckpointWriter
from trial_ray.experiments.checkpoints import (
    CHECKPOINT_EVERY,
    CHECKPOINTS_KEPT,
    list_checkpoints,
    newest_whole_checkpoint,
)
from trial_ray.experiments.config_record import run_labels, to_record
from trial_ray.experiments.cost import CostMeter, LearnerHardware, cost_table, recorded_time
from trial_ray.experiments.experiment import reached
from trial_ray.experiments.interrupt import GracefulInterrupt, termination_as_interrupt
from trial_ray.experiments.metrics import MetricWriters
from trial_ray.experiments.progress import TrainingProgress, waiting
from trial_ray.experiments.restarts import first_line, is_recoverable, record_restart
from trial_ray.experiments.stall_watch import StallWatch
from trial_ray.experiments.storage import storage_error
from trial_ray.experiments.trackers import DONE, INTERRUPTED, TrackedRun, Trackers, identifier

if TYPE_CHECKING:
    from rich.console import Console

    from trial_ray.algorithms.grpo import GRPO
    from trial_ray.algorithms.grpo_config import GRPOConfig
    from trial_ray.environments.entry import EnvironmentEntry
    from trial_ray.evaluation.panel import Panel
    from trial_ray.experiments.run_folder import RunFolder


class TrainingSession:
    """One run from building the algorithm to its summary.

    Args:
        config: validated.
        stop: training ends when one of these metrics reaches its value.
        folder: the run's.
        console: told how the run goes.
        resume: continue from the folder's newest checkpoint.
        final_panels: by name, what the trained policy plays at the end, and in which environment; without any, the config's
            panels are played before and after training, and both are compared.
        on_iteration: told of every iteration's metrics.
        checkpoint_every: iterations between checkpoints; the last iteration is always saved.
        checkpoints_kept: how many of the newest are kept.
        log_to: services that the metrics are sent to (:mod:`trial_ray.experiments.trackers`).
        trust: resume from a checkpoint that this user did not write on this machine, too.
        deadline: ``time.time()`` by which the run shall be saved and stopped, as after Ctrl-C: no iteration is begun that would
            end later, if it took as long as the longest one so far (at first the mean of earlier parts), and no evaluation after
            it.
    """

    def __init__(
        self,
        config: GRPOConfig,
        stop: dict[str, float],
        folder: RunFolder,
        console: Console,
        resume: bool = False,
        final_panels: Mapping[str, tuple[Panel, EnvironmentEntry]] | None = None,
        on_iteration: Callable[[dict[str, float]], None] = lambda metrics: None,
        checkpoint_every: int = CHECKPOINT_EVERY,
        checkpoints_kept: int = CHECKPOINTS_KEPT,
        log_to: Sequence[str] = (),
        trust: bool = False,
        deadline: float | None = None,
    ) -> None:
        self.config = config
        self.stop = stop
        self.folder = folder
        self.console = console
        self.resume = resume
        self.final_panels = dict(final_panels or {})
        self.on_iteration = on_iteration
        self.checkpoint_every = checkpoint_every
        self.checkpoints_kept = checkpoints_kept
        self.log_to = log_to
        self.trust = trust
        self.deadline = deadline
        made, seconds = recorded_time(folder.cost)
        self.longest_iteration_s = seconds / made if made else 0.0
        self.iteration = 0
        self.restarts = 0
        self.interrupted = False
        self.cost = CostMeter(folder.cost)
        self.comparisons: dict[str, PairedComparison] = {}
        self.checkpoint: Path | None = None

    def run(self, ray: AbstractContextManager[None]) -> None:
        """Run to the end, or to the interrupt; the run folder records how it ended.

        Args:
            ray: entered for as long as actors live.
        """
        started = time.monotonic()
        try:
            # Ray sets a handler of SIGTERM, under which the process would end without a record.
            with termination_as_interrupt(), self._trackers() as self.trackers, ray, termination_as_interrupt():
                try:
                    while not self._attempt(started):
                        self.resume = True
                    self.trackers.close(INTERRUPTED if self.interrupted else DONE)
                finally:
                    if self.cost.iterations:
                        self.console.print(cost_table(self.cost.write()))
        except KeyboardInterrupt:
            self.folder.set_state("interrupted")
            saved = list_checkpoints(self.folder.checkpoints)
            self._tell(f"stopped at once; last checkpoint: {saved[-1] if saved else 'none'}")
            raise
        except Exception as error:
            full = storage_error(error, self.folder.path)
            self._record_failure(full or error)
            if full is not None:
                raise full from error
            raise
        self.folder.set_state("interrupted" if self.interrupted else "done")
        self._tell_outcome()

    def _attempt(self, started: float) -> bool:
        """Train to the end with actors of its own; ``False`` after a failure from which the run is to continue."""
        algorithm = None
        try:
            algorithm = self._build()
            self._train_with(algorithm, started)
        except Exception as error:
            began = algorithm is not None or self.restarts
            if not began or self.restarts >= self.config.max_restarts or not is_recoverable(error):
                raise
            self.restarts += 1
            self._tell_restart(error)
            return False
        return True

    def _train_with(self, algorithm: GRPO, started: float) -> None:
        checkpoints = CheckpointWriter(algorithm, self.folder.checkpoints, self.checkpoints_kept)
        self.watch = StallWatch(
            algorithm, self.folder.library_log.parent, self.config.stall_timeout_s, self._tell, self._give_up
        )
        try:
            if not self.restarts:
                self.cost.started(LearnerHardware.of(algorithm))
            self._run(algorithm, checkpoints, started)
            self.cost.actors = algorithm.actor_reports()
        except Exception:
            self._finish_after_failure(checkpoints)
            raise
        finally:
            checkpoints.discard()
            algorithm.stop()

    def _tell_restart(self, error: Exception) -> None:
        saved = list_checkpoints(self.folder.checkpoints)
        source = f"from {saved[-1]}" if saved else "from the initial weights, since there is no checkpoint yet"
        line = f"restart {self.restarts} of at most {self.config.max_restarts}: {first_line(error)}; going on {source}"
        self._tell(line)
        record_restart(self.folder.library_log.parent, line, error)

    def _give_up(self, reason: str) -> None:
        """End the process, whose main thread may never return, and Ray with it; called by the watch over progress."""
        import psutil

        self.folder.write_error(InfrastructureError(reason))
        self.folder.set_state("failed")
        self.console.file.flush()
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
        os._exit(1)

    def _trackers(self) -> Trackers:
        run = TrackedRun(
            name=self.folder.path.name,
            key=identifier(f"{self.folder.path.name}-{self.folder.started()}"),
            settings=to_record(self.config),
            folder=self.folder.path,
            resumed=self.resume,
        )
        return Trackers(self.log_to, run, lambda line: self.console.print(line, highlight=False, markup=False))

    def _build(self) -> GRPO:
        # A run that was stopped before its first checkpoint begins again.
        checkpoint = None
        started = time.monotonic()
        if self.resume:
            checkpoint, damages = newest_whole_checkpoint(self.folder.checkpoints, trust=self.trust)
            for damage in damages:
                self._tell(f"left out: {damage}")
        with waiting(self.console, "preparing the policy and starting Ray's actors"):
            algorithm: GRPO = self.config.build_algo()
            if checkpoint is not None:
                try:
                    algorithm.restore_from_path(str(checkpoint))
                except BaseException:
                    algorithm.stop()
                    raise
        self.iteration = int(checkpoint.name) if checkpoint is not None else 0
        if self.resume:
            self.folder.drop_records_after(self.iteration)
            self.folder.set_state("running")
            self._tell(f"continuing after iteration {self.iteration}")
        self._tell(f"ready after {time.monotonic() - started:.0f} s")
        return algorithm

    def _run(self, algorithm: GRPO, checkpoints: CheckpointWriter, started: float) -> None:
        panels = {} if self.final_panels else algorithm.panels
        before = {
            name: self._evaluate(algorithm, _evaluation_name("before", name, panels), *panels[name]) for name in panels
        }
        checkpoint = self._train(algorithm, checkpoints)
        after = {}
        if not self.interrupted:
            for name, panel in panels.items():
                after[name] = self._evaluate(
                    algorithm, self.name_after(_evaluation_name("after", name, panels)), *panel
                )
            for name, panel in self.final_panels.items():
                self._evaluate(algorithm, self.name_after(name), *panel)
        self._summarise(before, after, checkpoint, time.monotonic() - started)

    def name_after(self, name: str) -> str:
        """What an evaluation of the current iteration is called; another iteration's is never taken for it."""
        return f"{name}_{self.iteration:06d}"

    def _evaluate(self, algorithm: GRPO, name: str, panel: Panel, entry: EnvironmentEntry) -> EvaluationResult:
        path = self.folder.evaluations / f"{name}.json"
        if path.exists():  # a resumed run is compared with its own beginning
            result = EvaluationResult.load(path)
        else:
            status = waiting(self.console, f"playing the panel: {len(panel)} held-out tasks")
            with status, self.cost.phase("evaluation"), self.watch.watching():
                result = algorithm.evaluate_panel(panel, entry)
            result.policy = f"{self.folder.path.name}, iteration {self.iteration}"
            result.labels = run_labels(self.config)
            result.save(path)
        self._tell(f"panel {name.replace('_', ' ')}: success {result.overall}")
        return result

    def _train(self, algorithm: GRPO, checkpoints: CheckpointWriter) -> Path:
        finished = reached(self.stop, {"training_iteration": self.iteration})
        total = self.stop.get("training_iteration")
        with (
            MetricWriters(self.folder, self.iteration) as writers,
            TrainingProgress(self.console, self.iteration, int(total) if total else None) as progress,
            GracefulInterrupt(self._announce_interrupt) as interrupt,
        ):
            while not finished and not interrupt.requested and not self._out_of_time():
                began = time.monotonic()
                try:
                    result = self._train_once(algorithm, checkpoints)
                except Exception as error:
                    if interrupt.requested and is_recoverable(error):
                        self._finish_after_failure(checkpoints)
                        raise KeyboardInterrupt from error  # to stop was what the user asked for
                    raise
                self.iteration = int(result["training_iteration"])
                metrics = writers.write(self.iteration, result)
                self.trackers.log(self.iteration, metrics)
                self.cost.iteration(metrics)
                progress.iteration(self.iteration, metrics)
                self.on_iteration({"training_iteration": self.iteration, **metrics})
                finished = reached(self.stop, metrics)
                with self.cost.phase("checkpoint"):
                    checkpoints.poll()
                    due = self.iteration % self.checkpoint_every == 0 and not finished
                    if due and not algorithm.guards.suspect:
                        checkpoints.begin(self.iteration)
                self.longest_iteration_s = max(self.longest_iteration_s, time.monotonic() - began)
            saved = self._save(checkpoints)
        # Also of a run that has made its last iteration: the panel after it can take long.
        self.interrupted = interrupt.requested or self._out_of_time()
        return saved

    def _out_of_time(self) -> bool:
        return self.deadline is not None and time.time() + self.longest_iteration_s > self.deadline

    def _train_once(self, algorithm: GRPO, checkpoints: CheckpointWriter) -> dict[str, Any]:
        try:
            with self.watch.watching():
                result: dict[str, Any] = algorithm.train()
        except Exception as error:
            cause = root_cause(error)
            if isinstance(cause, TrainingDivergedError) and not isinstance(cause, PolicyBrokenError):
                self._save_aside(checkpoints)
            raise
        return result

    def _save(self, checkpoints: CheckpointWriter) -> Path:
        """Save the state after the current iteration, unless that was done already; complete when this returns."""
        with self.cost.phase("checkpoint"):
            checkpoints.finish()
            saved = list_checkpoints(self.folder.checkpoints)
            if saved and int(saved[-1].name) == self.iteration:
                return saved[-1]
            return checkpoints.save(self.iteration)

    def _save_aside(self, checkpoints: CheckpointWriter) -> None:
        """Save the state that training stopped for, beside the checkpoints: the newest of those is still a good one."""
        with self.cost.phase("checkpoint"):
            saved = checkpoints.save(self.iteration, aside=True)
        self._tell(f"state saved aside: {saved}; rename it to {saved.stem} to continue from it all the same")

    def _finish_after_failure(self, checkpoints: CheckpointWriter) -> None:
        """Complete the checkpoint that was being written; what stopped the run stays the error that is reported."""
        try:
            checkpoints.finish()
        except Exception as error:  # the learner that wrote it may be what died
            self._tell(f"the checkpoint being written was lost: {error}")

    def _announce_interrupt(self) -> None:
        self._tell("finishing the iteration under way, then saving; Ctrl-C again stops at once")

    def _tell(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _summarise(
        self,
        before: Mapping[str, EvaluationResult],
        after: Mapping[str, EvaluationResult],
        checkpoint: Path,
        seconds: float,
    ) -> None:
        comparisons = {name: paired_comparison(before[name], after[name]) for name in after}
        self.comparisons = comparisons
        self.checkpoint = checkpoint
        self.folder.write_summary(
            {
                "method": method_of(self.config),
                "seed": self.config.seed,
                "iterations": self.iteration,
                "interrupted": self.interrupted,
                "seconds": round(seconds, 1),
                "checkpoint": str(checkpoint.relative_to(self.folder.path)),
                "before": _only_or_all({name: result.to_dict()["summary"] for name, result in before.items()}),
                "after": _only_or_all({name: result.to_dict()["summary"] for name, result in after.items()}),
                "comparison": _only_or_all({name: found.to_dict() for name, found in comparisons.items()}),
            }
        )

    def _tell_outcome(self) -> None:
        """What was learned and where it is, after the cost, so that it is what stands at the end."""
        for name, comparison in self.comparisons.items():
            of = f" in {name}" if len(self.comparisons) > 1 else ""
            self._tell(f"learned{of}: success {comparison.before:.1%} → {comparison.after:.1%}, change {comparison}")
        if self.interrupted:
            self._tell(
                f"stopped after iteration {self.iteration}; the same command continues with --resume {self.folder.path}"
            )
        self._tell(f"checkpoint: {self.checkpoint}")

    def _record_failure(self, error: Exception) -> None:
        began = self.resume or self.iteration or any(self.folder.evaluations.iterdir())
        if not began and is_user_error(error):
            self.folder.discard()
            return
        try:
            self.folder.write_error(error)
            self.folder.set_state("failed")
        except OSError as failure:
            self._tell(f"what happened could not be recorded in {self.folder.path}: {failure}")
        saved = list_checkpoints(self.folder.checkpoints)
        if saved:
            self.console.print(
                f"last checkpoint: {saved[-1]}; continue with --resume {self.folder.path}",
                highlight=False,
                soft_wrap=True,
            )


def _evaluation_name(when: str, environment: str, panels: Mapping[str, Any]) -> str:
    """File name of a panel's evaluation; in a mixture with the environment's name."""
    return when if len(panels) == 1 else f"{when}_{environment}"


def _only_or_all(values: Mapping[str, Any]) -> Any:
    """The value of the only environment, those of a mixture by name, ``None`` where there are none."""
    return next(iter(values.values()), None) if len(values) < 2 else dict(values)
