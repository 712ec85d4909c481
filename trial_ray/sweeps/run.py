"""Starts or continues a sweep in its folder with Ray Tune."""

from __future__ import annotations

import math
import os
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from shutil import copyfile
from typing import Any

from ray import tune
from ray.rllib.utils import unflatten_dict
from ray.tune.error import TuneError
from ray.tune.search import BasicVariantGenerator, Repeater
from ray.tune.search.repeater import TRIAL_INDEX
from ray.tune.utils import flatten_dict

from trial_ray.algorithms.grpo import GRPOConfig
from trial_ray.config.sampling import actor_range
from trial_ray.errors import CheckpointError, ConfigError, UserInputError, first_line
from trial_ray.files import Json, Numbers, checked_content, make_folder, read_json, replacing, write_json
from trial_ray.planning.fit import Machine, make_plan
from trial_ray.planning.memory import GIB, PlanRequest
from trial_ray.ray_internals import stop_of_tune
from trial_ray.runs.locks import require_free_folder
from trial_ray.runs.terminal import show
from trial_ray.secrets import redacted
from trial_ray.sweeps.callbacks import StopCriteria, TrialCallback
from trial_ray.sweeps.plan import SweepPlan
from trial_ray.sweeps.results import DONE, FAILED, UNFINISHED, SweepResult, TrialRecord
from trial_ray.sweeps.space import draws_values, is_population_based, pauses_trials, search_space, seeds_of
from trial_ray.termination import GracefulInterrupt
from trial_ray.trust import MARK, require_own_folder, sign_folder

MEMORY = ("memory", "object_store_memory")
"""Ray resources that are measured in bytes; their sum is the memory that was free when the nodes started."""
TOLERANCE = 1e-6
"""Rounding tolerance for resource amounts, which are sums of fractions."""


@dataclass(frozen=True)
class Capacity:
    """Resources of a trial and of the cluster, and the number of trials that fit.

    Attributes:
        needs: amount of each Ray resource that the largest trial reserves.
        offered: amounts that the cluster has.
        bytes_needed: predicted host memory of the largest trial; infinite if the shape of a trial's model is unknown.
        bytes_offered: memory of the cluster's nodes.
    """

    needs: Numbers
    offered: Numbers
    bytes_needed: float
    bytes_offered: float

    @classmethod
    def of(cls, configs: Sequence[GRPOConfig], cluster: Mapping[str, float]) -> Capacity:
        """Compare the resources that configs need with the resources of a cluster.

        Args:
            configs: configs of the trials, as in :attr:`SweepPlan.configs`.
            cluster: resources as returned by ``ray.cluster_resources()``.
        """
        needs: Any = Counter()
        for config in configs:
            # |= keeps the larger amount of each resource.
            needs |= Counter(config.algo_class.default_resource_request(config).required_resources)
        offered = {name: cluster.get(name, 0.0) for name in needs}
        return cls(needs, offered, max(map(_host_bytes, configs)), sum(cluster.get(name, 0.0) for name in MEMORY))

    @property
    def by_resources(self) -> int:
        """Number of trials that fit the cluster's resources at a time."""
        return min(int(self.offered[name] / need + TOLERANCE) for name, need in self.needs.items())

    @property
    def by_memory(self) -> float:
        """Number of trials that fit the cluster's memory; infinite if their memory cannot be predicted."""
        return int(self.bytes_offered / self.bytes_needed) if self.bytes_needed < math.inf else math.inf

    @property
    def trials(self) -> int:
        """Number of trials to run at a time, at least 1."""
        return max(1, int(min(self.by_resources, self.by_memory)))

    def require_one(self, local: bool) -> None:
        """Reject a sweep if not even one trial can start.

        Args:
            local: True if the cluster is only this machine; other clusters may grow and are not checked.

        Raises:
            ConfigError: a trial reserves more than the cluster has; the message contains both amounts.
        """
        if local and self.by_resources < 1:
            raise ConfigError(
                f"A trial reserves {self._amounts()}, so no trial could start. Lower num_cpus_per_env_runner, num_cpus_per_engine, "
                "num_cpus_per_learner or num_cpus_for_main_process (fractions are allowed), or the number of actors."
            )

    def describe(self, number: int, at_once: int) -> str:
        """Return one line that describes how ``number`` trials will run."""
        memory = (
            "its memory cannot be predicted"
            if self.bytes_needed == math.inf
            else f"about {self.bytes_needed / GIB:.1f} of {self.bytes_offered / GIB:.1f} GiB"
        )
        trials = "trial" if number == 1 else "trials"
        tight = ", which may not suffice for one trial" if self.by_memory == 0 else ""
        return f"{number} {trials}, {min(number, at_once)} at a time: each takes {self._amounts()}, {memory}{tight}"

    def _amounts(self) -> str:
        names = sorted(self.needs)
        return ", ".join(
            f"{self.needs[name]:g} of {self.offered[name]:g} {name}{'s' if name in ('CPU', 'GPU') else ''}"
            for name in names
        )


def _host_bytes(config: GRPOConfig) -> float:
    try:
        request = PlanRequest.of(config)
        engines, runners = actor_range(config.num_engines)[0], actor_range(config.num_env_runners)[0]
        reserved = replace(request, num_engines=engines, num_env_runners=max(1, runners))
        actors = make_plan(reserved, Machine(None, None)).actors
    except ConfigError:
        return math.inf  # The model's shape is not known on this machine.
    return sum(actor.count * actor.total for actor in actors if not actor.on_gpu)


CHECKPOINT_EVERY = 5
"""Number of iterations between two checkpoints of a trial."""
DEFINITION = "definition.json"
"""File in a sweep's folder with the plan's description and the options of the sweep's command."""
RESTART_FILES = ("tuner.pkl", DEFINITION, MARK)
"""Files in a sweep's folder that the sweep needs to continue."""
KEPT = "logs/kept"
"""Folder with copies of :data:`RESTART_FILES`. Tune often rewrites files in the sweep's folder; a file is empty if the process is
killed while Tune writes it. Tune does not write into the subfolder ``logs``."""
TUNE_ENVIRONMENT = {
    # Tune would end the sweep at any result without the metric, but evaluation metrics are not in every result. StopCriteria
    # checks the first result instead, and its error names similar metrics.
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    # Keep the working directory of the command: data folders may be relative to it.
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    # Ray's new progress output prints a banner even with verbose=0.
    "RAY_AIR_NEW_OUTPUT": "0",
}


def copy_restart_files(folder: Path) -> None:
    """Back up the files in ``folder`` that continuing the sweep needs."""
    for name in RESTART_FILES:
        if (folder / name).is_file():
            with replacing(folder / KEPT / name) as partial_copy:
                copyfile(folder / name, partial_copy)


def restore_restart_files(folder: Path) -> None:
    """Replace files of a sweep's folder that are empty or missing by the copies of :func:`copy_restart_files`, if any."""
    for kept in (folder / KEPT / name for name in RESTART_FILES):
        file = folder / kept.name
        if kept.is_file() and not (file.is_file() and file.stat().st_size):
            copyfile(kept, file)


@dataclass(frozen=True)
class Sweep:
    """A sweep and its folder.

    Attributes:
        plan: plan of the trials.
        folder: folder of the sweep, with one subfolder per trial.
        log_to: tracking services that every trial is logged to.
        command: command line of the sweep, which every run folder records.
    """

    plan: SweepPlan
    folder: Path
    log_to: tuple[str, ...] = ()
    command: tuple[str, ...] = ()

    @property
    def is_begun(self) -> bool:
        """True if the folder has a sweep, whether of this plan or of another one."""
        return (self.folder / DEFINITION).exists()

    def require_folder(self, resume: bool, trust: bool = False) -> None:
        """Check that the folder may be used.

        Args:
            resume: whether to continue the sweep in the folder.
            trust: whether to continue a sweep that another user may have started; Tune's records are pickles, which can run any
                code.

        Raises:
            UserInputError: the folder of a new sweep is not empty.
            CheckpointError: there is no sweep to continue, it may belong to another user, or its plan was different.
        """
        folder = self.folder
        if resume and not tune.Tuner.can_restore(str(folder)):
            raise CheckpointError(f"{folder} has no sweep to continue.")
        if resume and not trust:
            require_own_folder(folder)
        if resume:
            self.require_same_plan()
        else:
            require_free_folder(folder, ", or continue with --resume")

    def require_same_plan(self) -> None:
        """Check that the folder's sweep was started with the same plan.

        Raises:
            CheckpointError: the plans differ; the message contains the first difference.
        """
        before = _definition(self.folder)["description"]
        now = self.plan.description
        if differing := sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name)):
            name = differing[0]
            raise CheckpointError(
                f"{self.folder} has another sweep than {self.plan.path} defines: {name} was {before.get(name)!r:.200}, and is "
                f"{now.get(name)!r:.200} now. Continue with the file of that sweep, or start a new sweep."
            )

    def begin(self) -> None:
        """Create the folder, mark it as this user's, and write :data:`DEFINITION`."""
        make_folder(self.folder)
        sign_folder(self.folder)
        overrides = [redacted(override) for override in self.plan.overrides]
        definition = {
            "iterations": self.plan.iterations,
            "overrides": overrides,
            "method": self.plan.method,
            "description": self.plan.description,
        }
        write_json(self.folder / DEFINITION, definition)

    def fit(self, at_once: int, resume: bool = False) -> SweepResult:
        """Run or continue all trials and print one line per iteration. Ray must be connected.

        Args:
            at_once: maximum number of trials at a time.
            resume: whether to continue the sweep in the folder, with the same maximum number of trials as before.

        Raises:
            ConfigError: trials do not report the metric or a key of ``stop``.
            CheckpointError: the sweep to continue cannot be read.
        """
        os.environ.update(TUNE_ENVIRONMENT)
        if not resume:
            self.begin()
        tuner = self._restored() if resume else self._new(at_once)
        copy_restart_files(self.folder)
        stop = threading.Event()
        try:
            with stop_of_tune(stop), GracefulInterrupt(partial(_request_stop, stop)) as interrupt:
                results = tuner.fit()
        except TuneError as error:
            if isinstance(error.__context__, UserInputError):
                raise error.__context__ from None
            raise
        return SweepResult(
            self.plan.metric,
            self.plan.mode,
            [_record(results[index], self.plan, interrupt.requested) for index in range(len(results))],
            self.plan.repeats,
            # Without an interrupt, trials are missing only if the searcher ended early; these trials are not counted.
            not_started=max(0, self.plan.num_trials - len(results)) if interrupt.requested else 0,
        )

    def _restored(self) -> tune.Tuner:
        try:
            return tune.Tuner.restore(
                str(self.folder),
                trainable=self.plan.config.algo_class,
                param_space=self.plan.param_space,
                resume_unfinished=True,
                resume_errored=True,
            )
        except Exception as error:  # Unpickling a damaged file may raise any error.
            raise CheckpointError(
                f"The sweep in {self.folder} cannot be continued: {type(error).__name__}: {error}. Start a new one "
                "in another folder."
            ) from error

    def _new(self, at_once: int) -> tune.Tuner:
        plan = self.plan
        population, pauses = is_population_based(plan.scheduler), pauses_trials(plan.scheduler)
        seeds = len(seeds_of(plan.spaces)) if plan.search_alg is not None else 1
        return tune.Tuner(
            plan.config.algo_class,
            param_space=plan.param_space,
            tune_config=tune.TuneConfig(
                metric=plan.metric,
                mode=plan.mode,
                num_samples=plan.num_samples * max(1, seeds),
                scheduler=plan.scheduler,
                search_alg=self._search_alg(0 if pauses else at_once),
                # With a scheduler that pauses trials, all trials must start, and paused trials count as running.
                max_concurrent_trials=None if pauses else at_once,
                # A new trial uses the actors of an ended trial if both need the same resources.
                reuse_actors=True,
                trial_name_creator=plan.trial_name,
                trial_dirname_creator=plan.trial_name,
            ),
            run_config=tune.RunConfig(
                name=self.folder.name,
                storage_path=str(self.folder.parent),
                stop=StopCriteria(plan.stop, plan.metric),
                callbacks=[self._callback()],
                checkpoint_config=tune.CheckpointConfig(
                    checkpoint_frequency=CHECKPOINT_EVERY, checkpoint_at_end=True, num_to_keep=None if population else 1
                ),
                verbose=0,
            ),
        )

    def _search_alg(self, at_once: int) -> Any:
        searcher, seeds = self.plan.search_alg, seeds_of(self.plan.spaces)
        if searcher is not None:
            return EverySeed(searcher, seeds)
        if not (seeds and draws_values(self.plan.spaces)):
            return None
        # constant_grid_search trains every draw with every seed.
        return BasicVariantGenerator(constant_grid_search=True, max_concurrent=at_once)

    def _callback(self) -> TrialCallback:
        scheduler, kept = self.plan.scheduler, None
        # Keep all checkpoints if the perturbation interval is not in iterations: the number of checkpoints per interval is unknown.
        if is_population_based(scheduler) and scheduler._time_attr == "training_iteration":
            kept = 2 + math.ceil(scheduler._perturbation_interval / CHECKPOINT_EVERY)
        return TrialCallback(self.command, self.log_to, self.folder.name, kept)


def recorded_options(folder: Path) -> tuple[int | None, list[str], str | None]:
    """Read the iterations, overrides and method of the sweep in a folder.

    Raises:
        CheckpointError: the folder has no sweep, or its record is damaged.
    """
    definition = _definition(folder)
    return definition["iterations"], definition["overrides"], definition["method"]


def _definition(folder: Path) -> Json:
    restore_restart_files(folder)
    path = folder / DEFINITION
    if not path.exists():
        raise CheckpointError(f"{folder} has no sweep to continue.")
    definition = read_json(path)
    with checked_content(path):
        if (
            not isinstance(definition["description"], dict)
            or not isinstance(definition["iterations"], int | None)
            or not isinstance(definition["method"], str | None)
            or not all(isinstance(override, str) for override in definition["overrides"])
        ):
            raise TypeError("its values have other types than in this version")
    return definition


def _request_stop(stop: threading.Event) -> None:
    show("stopping the trials; Ctrl-C again stops at once")
    stop.set()


class EverySeed(Repeater):
    """Trains each suggestion of a searcher with every seed, and reports the mean to the searcher.

    The searcher receives only the search space, because Tune would read the ``/`` in environment ids as a path into the config.

    Args:
        searcher: Ray Tune searcher.
        seeds: seeds with which each suggestion is trained; if it is empty, the config's seed is used.
    """

    def __init__(self, searcher: Any, seeds: Sequence[int]) -> None:
        super().__init__(searcher, repeat=max(1, len(seeds)), set_index=True)
        self.seeds = list(seeds)

    def set_search_properties(self, metric: str | None, mode: str | None, config: Json, **spec: Any) -> bool:
        """Pass the metric, the mode and the search space to the searcher."""
        return bool(
            super().set_search_properties(metric, mode, unflatten_dict(dict(search_space(config)), "."), **spec)
        )

    def suggest(self, trial_id: str) -> Any:
        """Return the parameters and the seed of the next trial, or the searcher's return value if it suggests no parameters."""
        suggested = super().suggest(trial_id)
        if isinstance(suggested, dict):
            index = suggested.pop(TRIAL_INDEX)
            suggested |= {"seed": self.seeds[index]} if self.seeds else {}
        return suggested


def _record(result: Any, plan: SweepPlan, interrupted: bool) -> TrialRecord:
    metrics = result.metrics or {}  # A trial that never started has no metrics.
    # A paused trial that HyperBand ends does not report that it is done.
    done = metrics.get("done") or (metrics and not interrupted)
    status = FAILED if result.error else DONE if done else UNFINISHED
    return TrialRecord(
        name=Path(result.path).name if plan.trial_name else metrics.get("trial_id") or Path(result.path).name,
        parameters=plan.parameters(result),
        status=status,
        iterations=int(metrics.get("training_iteration", 0)),
        metric=_last_value(result, metrics, plan.metric),
        seconds=float(metrics.get("time_total_s", 0.0)),
        error=redacted(first_line(result.error))[:300] if result.error else "",
    )


def _last_value(result: Any, metrics: Json, metric: str) -> float | None:
    """Return the metric of the last iteration that reported it, because evaluation may not run in every iteration.

    A non-finite value counts as reported, so a diverged trial does not keep an earlier value.
    """
    value, history = flatten_dict(metrics, delimiter="/").get(metric), result.metrics_dataframe
    if value is None and history is not None and metric in history:
        reported = history[metric].dropna()
        value = reported.iloc[-1] if len(reported) else None
    return None if value is None else float(value)
