"""Planned runs through Ray Tune: each trial trains, evaluates its final sets, and leaves a run folder."""

from __future__ import annotations

import io
import os
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trial_ray.files import write_json
from trial_ray.reproduction.studies import PlannedRun, set_name
from trial_ray.runs.cost import recorded_time
from trial_ray.runs.folder import RunFolder
from trial_ray.termination import INTERRUPTING, GracefulInterrupt, StopRequest


def make_warm_starts(runs: Sequence[PlannedRun], deadline: float | None = None) -> None:
    """Make the warm starts that runs begin from, one after the other; trials, which show nothing, then find them in the cache.

    Args:
        runs: of which those that are done need none.
        deadline: ``time.time()`` after which no other one is begun.

    Raises:
        ConfigError, CheckpointError, ChatTemplateError: a warm start's settings or model are wrong.
    """
    from trial_ray.algorithms.initial_policy import initial_policy

    waiting = [run for run in runs if run.config.warm_start is not None and run.state() != "done"]
    for run in {(run.environment, run.backbone): run for run in waiting}.values():
        if deadline is None or time.time() < deadline:
            initial_policy(run.config)


def execute(
    runs: Sequence[PlannedRun], scale_file: Path, folder: Path, trust: bool = False, deadline: float | None = None
) -> list[str]:
    """Train what is not done, as many runs at a time as the cluster holds; Ray must be connected.

    An unfinished run continues from its newest checkpoint. A run that fails ends none of the others. After Ctrl-C or SIGTERM runs
    finish their iteration and are saved; after a second one they stop at once.

    Args:
        runs: of which those that are done are skipped.
        scale_file: copied into each run folder.
        folder: Tune's own records go to ``tune/`` below it.
        trust: continue from checkpoints that this user did not write on this machine, too.
        deadline: ``time.time()`` by which runs are saved and stopped; none is begun later.

    Returns:
        Names of the runs that failed.

    Raises:
        KeyboardInterrupt: after the second signal.
    """
    from ray import tune

    from trial_ray.ray_internals import stop_of_tune
    from trial_ray.sweeps.callbacks import SweepReporter
    from trial_ray.sweeps.tuner import TUNE_ENVIRONMENT

    waiting = {run.name: run for run in runs if run.state() != "done"}
    if not waiting:
        return []
    os.environ.update(TUNE_ENVIRONMENT)
    interrupted = folder.resolve() / ".interrupted"
    interrupted.unlink(missing_ok=True)
    request = StopRequest(deadline, interrupted)
    trainable = tune.with_parameters(_train, runs=waiting, scale_file=scale_file, trust=trust, request=request)
    tuner = tune.Tuner(
        tune.with_resources(trainable, lambda trial: _resources(waiting[trial["run"]])),
        param_space={"run": tune.grid_search(list(waiting))},
        tune_config=tune.TuneConfig(
            trial_name_creator=lambda trial: trial.config["run"],
            trial_dirname_creator=lambda trial: trial.config["run"],
        ),
        run_config=tune.RunConfig(
            name="tune", storage_path=str(folder.resolve()), callbacks=[SweepReporter(len(waiting))], verbose=0
        ),
    )

    # Tune's own stop would end trials in the middle of an iteration.
    with stop_of_tune(threading.Event()), GracefulInterrupt(partial(_request_stop, interrupted)):
        grid = tuner.fit()
    results = [grid[index] for index in range(len(grid))]
    return [result.config["run"] if result.config else str(result.path) for result in results if result.error]


def _request_stop(file: Path) -> None:
    from rich import get_console

    from trial_ray.runs.terminal import say

    file.touch()
    say(get_console(), INTERRUPTING)


def _resources(run: PlannedRun) -> Any:
    return run.config.algo_class.default_resource_request(run.config)


def _train(
    trial: dict[str, Any], runs: dict[str, PlannedRun], scale_file: Path, trust: bool, request: StopRequest
) -> None:
    """Train one run, in a trial's own actor."""
    if request.is_due():
        return
    import contextlib

    from ray import tune
    from rich.console import Console

    from trial_ray.evaluation.panels import choose_panel
    from trial_ray.runs.session import TrainingSession

    run = runs[trial["run"]]
    resume = run.folder.exists()
    command = [*sys.argv[:1], "reproduce", run.name]
    where = run.folder
    folder = RunFolder.reopen(where, command) if resume else RunFolder.create(where, run.config, scale_file, command)
    panels = {}
    for evaluated in run.sets:
        entry = run.entry(evaluated)
        panels[set_name(evaluated)] = choose_panel(entry, evaluated.panel), entry
    session = TrainingSession(
        run.config,
        {"training_iteration": run.iterations},
        folder,
        Console(file=io.StringIO()),  # the driver prints what is reported
        resume=resume,
        final_panels=panels,
        on_iteration=lambda metrics: tune.report(metrics),
        trust=trust,
        stop_request=request,
    )
    session.run(contextlib.nullcontext())


def write_plan(folder: Path, name: str, runs: Sequence[PlannedRun]) -> Path:
    """Write how far runs are.

    Args:
        folder: of the reproduction.
        name: of the study.
        runs: its own, or those that a setting is chosen out of.

    Returns:
        The file. ``hours_left`` is what the iterations that are left take at the mean pace so far, if one run follows the other;
        ``None`` before the first iteration.
    """
    costs = {run.name: recorded_time(RunFolder(run.folder).cost) for run in runs}
    made = sum(iterations for iterations, _ in costs.values())
    hours = sum(seconds for _, seconds in costs.values()) / 3600
    left = sum(run.iterations - run.trained for run in runs)
    return write_json(
        folder / "plan.json",
        {
            "study": name,
            "hours": hours,
            "iterations_left": left,
            "hours_left": left * hours / made if made else None,
            "runs": [
                {
                    "run": run.name,
                    "state": run.state(),
                    "trained": run.trained,
                    "iterations": run.iterations,
                    "seconds": costs[run.name][1],
                }
                for run in runs
            ],
        },
    )
