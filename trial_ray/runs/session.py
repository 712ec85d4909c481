"""One training run: evaluation, iterations with metrics and checkpoints, second evaluation, summary."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trial_ray.adapters.registry import EnvironmentEntry
from trial_ray.algorithms.methods import method_of
from trial_ray.algorithms.placement import with_fewer_learners
from trial_ray.algorithms.timeline import write_timeline
from trial_ray.engines.pool import FAULTS
from trial_ray.errors import (
    InfrastructureError,
    PolicyBrokenError,
    ResourcesError,
    TrainingDivergedError,
    first_line,
    is_user_error,
    root_cause,
)
from trial_ray.evaluation.comparison import PairedComparison
from trial_ray.evaluation.results import EvaluationResult
from trial_ray.files import Json, Numbers, Record, storage_error, write_json
from trial_ray.runs.checkpoints import (
    CHECKPOINT_EVERY,
    CHECKPOINTS_KEPT,
    STOPPED,
    list_checkpoints,
    newest_whole_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)
from trial_ray.runs.config_record import run_labels, to_record
from trial_ray.runs.cost import CostMeter, cost_table, learner_hardware, measure_or_warn
from trial_ray.runs.evaluations import RunEvaluations, compare_with_beginning, evaluation_file
from trial_ray.runs.experiment import reached
from trial_ray.runs.locks import folder_lock
from trial_ray.runs.metrics_file import flatten, recorded_metrics
from trial_ray.runs.node_records import NodeRecords
from trial_ray.runs.terminal import say, training_progress, waiting
from trial_ray.runs.trackers import DONE, INTERRUPTED, TrackedRun, Trackers, identifier
from trial_ray.runs.watchdog import Watchdog, is_recoverable
from trial_ray.termination import (
    INTERRUPTING,
    GracefulInterrupt,
    end_child_processes,
    raise_swallowed_interrupt,
    termination_as_interrupt,
)

if TYPE_CHECKING:
    from rich.console import Console

    from trial_ray.algorithms.grpo import GRPO, GRPOConfig
    from trial_ray.evaluation.evaluation_sets import EvaluationSet
    from trial_ray.runs.folder import RunFolder


@dataclass(eq=False)
class TrainingSession:
    """One training run, from building the algorithm to writing the run's summary.

    Attributes:
        config: validated config.
        stop: values by metric; training ends when one metric reaches its value.
        folder: the run's folder.
        console: console for the run's progress.
        resume: whether to continue from the folder's newest checkpoint.
        on_checkpoint: called each time that a checkpoint is complete.
        checkpoint_every: iterations between checkpoints; the last iteration is always saved.
        checkpoints_kept: number of newest checkpoints to keep.
        log_to: services that receive the metrics (:mod:`trial_ray.runs.trackers`).
        trust: whether to resume also from a checkpoint that this user did not write on this machine.
    """

    config: GRPOConfig
    stop: Numbers
    folder: RunFolder
    console: Console
    resume: bool = False
    on_checkpoint: Callable[[], None] = lambda: None
    checkpoint_every: int = CHECKPOINT_EVERY
    checkpoints_kept: int = CHECKPOINTS_KEPT
    log_to: Sequence[str] = ()
    trust: bool = False

    def __post_init__(self) -> None:
        self.folder.fix_date(self.config)
        self._print = partial(say, self.console)
        self.resumed = False
        self.iteration = 0
        self.restarts = 0
        self.interrupted = False
        self.after: dict[str, EvaluationResult] = {}
        self.comparisons: dict[str, PairedComparison | str] = {}
        self.checkpoint: Path | None = None
        self.card: Json = {}
        total = self.stop.get("training_iteration")
        self.total = int(total) if total else None

    def run(self, ray: AbstractContextManager[None]) -> None:
        """Train until a stop criterion or an interrupt; the run folder records the outcome.

        Args:
            ray: context manager that connects to Ray; it is entered before the actors start and exited after they stop.

        Raises:
            FolderInUseError: another command writes into the run folder.
        """
        with folder_lock(self.folder.path, self.folder.command):
            self._run_alone(ray)

    def _run_alone(self, ray: AbstractContextManager[None]) -> None:
        if self._is_complete():
            self._print_outcome()
            return
        self.cost = CostMeter(self.folder.cost)
        try:
            with termination_as_interrupt(), self._trackers() as self.trackers, ray:
                try:
                    while not self._attempt():
                        self.resume, self.card = True, {}
                    self.trackers.close(INTERRUPTED if self.interrupted else DONE)
                finally:
                    if self.cost.began:
                        self.console.print(cost_table(self.card or self.cost.write()))
        except KeyboardInterrupt:
            if self._has_begun():
                self.folder.set_state("interrupted")
            saved = list_checkpoints(self.folder.checkpoints)
            self._print(f"stopped at once; last checkpoint: {saved[-1] if saved else 'none'}")
            raise
        except Exception as error:
            full = storage_error(error, self.folder.path, self.folder.address)
            self._record_failure(full or error)
            if full is not None:
                raise full from error
            raise
        self.folder.set_state("interrupted" if self.interrupted else "done")
        self._print_outcome()

    def _attempt(self) -> bool:
        """Start the actors and train to the end; return ``False`` after a failure from which the run should restart."""
        algorithm = None
        try:
            algorithm = self._build()
            self._train_with(algorithm)
        except Exception as error:
            began = algorithm is not None or self.restarts
            if not began or self.restarts >= self.config.max_restarts or not is_recoverable(error):
                raise
            self.restarts += 1
            self._report_restart(error)
            return False
        return True

    def _train_with(self, algorithm: GRPO) -> None:
        self.watchdog = Watchdog(algorithm, self.config.stall_timeout_s, self._print, self._give_up)
        try:
            if not self.cost.began:
                self.cost.started(measure_or_warn("the learners' device", lambda: learner_hardware(algorithm)))
            self._run(algorithm)
        finally:
            algorithm.stop()

    def _report_restart(self, error: Exception) -> None:
        saved = list_checkpoints(self.folder.checkpoints)
        source = f"from {saved[-1]}" if saved else "from the initial weights, since there is no checkpoint yet"
        repeated = self.iteration - (int(saved[-1].name) if saved else 0)
        note = f", repeating {repeated} iteration{'' if repeated == 1 else 's'}" if repeated else ""
        line = f"restart {self.restarts} of at most {self.config.max_restarts}: {first_line(error)}; continuing {source}{note}"
        self._print(line)
        self.folder.write_error(error, line)

    def _give_up(self, reason: str) -> None:
        """End Ray and this process, whose main thread may hang; called by the watchdog."""
        self.folder.write_error(InfrastructureError(reason))
        self.folder.set_state("failed")
        self.console.file.flush()
        end_child_processes()
        os._exit(1)

    def _trackers(self) -> Trackers:
        run = TrackedRun(
            name=self.folder.path.name,
            key=identifier(f"{self.folder.path.name}-{self.folder.started()}"),
            settings=to_record(self.config),
            folder=self.folder.path,
            resumed=self.resume,
        )
        return Trackers(self.log_to, run, self._print)

    def _build(self) -> GRPO:
        # A run that stopped before its first checkpoint is trained from scratch.
        checkpoint = None
        started = time.monotonic()
        if self.resume:
            checkpoint, damages = newest_whole_checkpoint(self.folder.checkpoints, trust=self.trust)
            for damage in damages:
                self._print(f"skipped: {damage}")
            if checkpoint is None:
                self.folder.require_never_saved()
        with waiting(self.console, "preparing the policy and starting Ray's actors"):
            algorithm = self._build_algorithm()
            try:
                if checkpoint is not None:
                    algorithm.restore_from_path(str(checkpoint))
                if self.resume:
                    self._resume(int(checkpoint.name) if checkpoint is not None else 0)
                before = self.folder.note_chat_template(algorithm.chat_template)
                if before not in (None, algorithm.chat_template):
                    self._print(f"changed: the chat template is {algorithm.chat_template}, it was {before}")
            except BaseException:
                algorithm.stop()
                raise
        self._print(f"ready after {time.monotonic() - started:.0f} s")
        return algorithm

    def _build_algorithm(self) -> GRPO:
        """Build the algorithm; after a restart, with fewer learners if the cluster no longer has room for all."""
        try:
            algorithm: GRPO = self.config.build_algo()
        except ResourcesError as error:
            fewer = with_fewer_learners(self.config) if self.restarts else None
            if fewer is None:
                raise
            self._print(
                f"{first_line(error)}. Continuing with {fewer.num_learners} of {self.config.num_learners} learners"
            )
            self.config = fewer
            algorithm = fewer.build_algo()
        return algorithm

    def _resume(self, iteration: int) -> None:
        changes = self.folder.resume(self.config, iteration)
        self.iteration, self.resumed = iteration, True
        self._print(f"continuing after iteration {self.iteration}")
        for change in changes:
            self._print(f"changed: {change.name} is {change.after!r:.200}, it was {change.before!r:.200}")

    def _run(self, algorithm: GRPO) -> None:
        self.after = {}
        evaluation_sets = algorithm.evaluation_sets
        several = len(evaluation_sets) > 1  # With several sets, file names contain the environment's name.

        def play(evaluation_set: EvaluationSet, entry: EnvironmentEntry) -> EvaluationResult:
            spinner = waiting(self.console, f"evaluating: {len(evaluation_set)} held-out tasks")
            with spinner, self.cost.phase("evaluation"), self.watchdog.watching():
                result = algorithm.evaluate_set(evaluation_set, entry)
            if faults := algorithm.take_faults():
                self._print(faults)
            return result

        evaluations = RunEvaluations(
            self.folder.evaluations,
            self.folder.path.name,
            run_labels(self.config),
            algorithm.evaluation_protocol,
            play,
            self._print,
        )
        before = {
            name: result
            for name, evaluation_set in evaluation_sets.items()
            if (result := evaluations.before(name if several else "", self.iteration, *evaluation_set)) is not None
        }
        checkpoint = self._train(algorithm)
        if not self.interrupted:
            for name, evaluation_set in evaluation_sets.items():
                file = evaluation_file(name if several else "", self.iteration)
                self.after[name] = evaluations.after(file, self.iteration, *evaluation_set)
        self.cost.actors = measure_or_warn("the reports of the actors", algorithm.actor_reports) or {}
        self.card = self.cost.write()
        self._summarise(before, checkpoint, several)

    def _train(self, algorithm: GRPO) -> Path:
        from tensorboardX import SummaryWriter

        finished = bool(self._met_criteria(self.iteration))
        records = NodeRecords(self.folder.path, self.folder.path)
        records.drop()
        with (
            contextlib.closing(SummaryWriter(str(self.folder.tensorboard), purge_step=self.iteration + 1)) as events,
            training_progress(self.console, self.iteration, self.total) as progress,
            GracefulInterrupt(partial(self._print, INTERRUPTING)) as interrupt,
        ):
            while not finished and not interrupt.requested:
                try:
                    result = self._train_once(algorithm)
                except Exception as error:
                    if interrupt.requested and is_recoverable(error):
                        raise KeyboardInterrupt from error  # A signal has requested the end of the run, so do not restart it.
                    raise
                raise_swallowed_interrupt()
                self.iteration = int(result["training_iteration"])
                metrics = flatten(result)
                self.folder.log(self.iteration, metrics)
                records.gather()
                for name, value in metrics.items():
                    events.add_scalar(name, value, self.iteration)
                events.flush()
                self.trackers.log(self.iteration, metrics)
                self.cost.iteration(metrics)
                progress(self.iteration, metrics)
                if FAULTS in result:
                    self._print(result[FAULTS])
                finished = reached(self.stop, metrics)
                due = self.iteration % self.checkpoint_every == 0 and not finished
                if due and not algorithm.health_checks.suspect:
                    self._save(algorithm)
            # Write the timeline before the evaluation after training, whose events would replace those of the last iteration.
            measure_or_warn("the timeline", lambda: write_timeline(self.folder.timeline, algorithm.timeline()))
            saved = self._save(algorithm)
        # An interrupt during the last iteration counts too: the evaluation after training is then skipped.
        self.interrupted = interrupt.requested
        return saved

    def _met_criteria(self, iteration: int) -> list[str]:
        """Return the metrics in ``stop`` that had reached their values in iteration ``iteration``."""
        metrics = recorded_metrics(self.folder.metrics, iteration) if self.resume else {}
        metrics = {**metrics, "training_iteration": iteration}
        return [name for name, value in self.stop.items() if reached({name: value}, metrics)]

    def _is_complete(self) -> bool:
        """Return True if nothing is left to train or evaluate; print a line if training is complete."""
        saved = list_checkpoints(self.folder.checkpoints)
        if not self.resume or not saved or not (met := self._met_criteria(int(saved[-1].name))):
            return False
        advice = f"to continue, raise or remove {', '.join(met)} in `stop`"
        if met == ["training_iteration"]:
            advice = "--iterations N continues"
        self._print(f"nothing to train: `stop` was reached after iteration {int(saved[-1].name)}; {advice}")
        self.checkpoint = saved[-1]
        return self.folder.is_complete(self.config, saved[-1])

    def _train_once(self, algorithm: GRPO) -> Json:
        try:
            with self.watchdog.watching():
                result: Json = algorithm.train()
        except Exception as error:
            cause = root_cause(error)
            if isinstance(cause, TrainingDivergedError) and not isinstance(cause, PolicyBrokenError):
                self._save_aside(algorithm)
            raise
        return result

    def _save(self, algorithm: GRPO) -> Path:
        """Save a checkpoint of the current iteration unless it exists already, and return its path."""
        target = self.folder.checkpoints / f"{self.iteration:06d}"
        if target in list_checkpoints(self.folder.checkpoints):
            return target
        with self.cost.phase("checkpoint"):
            save_checkpoint(target, algorithm.save_to_path)
            # run.json records the iteration, because the checkpoint itself may be moved or removed.
            self.folder.note(saved_iteration=self.iteration)
            prune_checkpoints(self.folder.checkpoints, self.checkpoints_kept)
            self.on_checkpoint()
        return target

    def _save_aside(self, algorithm: GRPO) -> None:
        """Save the state of a diverged run under a name that resuming ignores; the newest checkpoint stays valid."""
        target = self.folder.checkpoints / f"{self.iteration:06d}{STOPPED}"
        with self.cost.phase("checkpoint"):
            save_checkpoint(target, algorithm.save_to_path)
        self._print(f"state saved aside: {target}; rename it to {target.stem} to continue from it anyway")

    def _summarise(self, before: Mapping[str, EvaluationResult], checkpoint: Path, several: bool) -> None:
        def shown(values: Record) -> Any:
            """Return ``values`` if the run has several evaluation sets, else the only value (``None`` if there is none)."""
            return dict(values) if several else next(iter(values.values()), None)

        self.comparisons = {
            name: compare_with_beginning(before.get(name), result) for name, result in self.after.items()
        }
        self.checkpoint = checkpoint
        write_json(
            self.folder.summary,
            {
                "method": method_of(self.config),
                "seed": self.config.seed,
                "iterations": self.iteration,
                "interrupted": self.interrupted,
                "seconds": self.card["wall_seconds"],
                "checkpoint": str(checkpoint.relative_to(self.folder.path)),
                "before": shown({name: result.to_dict()["summary"] for name, result in before.items()}),
                "after": shown({name: result.to_dict()["summary"] for name, result in self.after.items()}),
                "comparison": shown(
                    {
                        name: {"not_compared": outcome} if isinstance(outcome, str) else outcome.to_dict()
                        for name, outcome in self.comparisons.items()
                    }
                ),
            },
        )

    def _print_outcome(self) -> None:
        """Print the success rates and the checkpoint, as the last lines of a run's output."""
        for name, comparison in self.comparisons.items():
            where = f" in {name}" if len(self.comparisons) > 1 else ""
            if isinstance(comparison, str):
                rate = self.after[name].overall
                self._print(f"success{where} after iteration {self.iteration}: {rate}. {comparison}")
            else:
                rates = f"{comparison.before:.1%} → {comparison.after:.1%}"
                self._print(f"evaluations{where}: success {rates}, change {comparison}")
        if self.interrupted:
            self._print(
                f"stopped after iteration {self.iteration}; the same command continues with --resume {self.folder.address}"
            )
        self._print(f"checkpoint: {self.checkpoint}")

    def _has_begun(self) -> bool:
        """Return True if this command may set the run's state: always for a new run; for a resumed run, after :meth:`_resume`."""
        return self.resumed or self.restarts > 0 or not self.resume

    def _record_failure(self, error: Exception) -> None:
        if is_user_error(error):
            if not self._has_begun():
                return
            evaluated = any(self.folder.evaluations.glob("*.json"))
            if not (self.resume or self.iteration or evaluated or self.folder.recorded_iterations()):
                self.folder.remove()
                return
        try:
            error.add_note(f"traceback: {self.folder.write_error(error)}")
            self.folder.set_state("failed")
        except OSError as failure:
            self._print(f"the events could not be recorded in {self.folder.path}: {failure}")
        if saved := list_checkpoints(self.folder.checkpoints):
            self._print(f"last checkpoint: {saved[-1]}; continue with --resume {self.folder.address}")
