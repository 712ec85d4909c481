"""``trial-ray sweep FILE``: searches over settings with Ray Tune, or runs a study, a comparison of methods over seeds."""

from __future__ import annotations

import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from trial_ray.cli.console import (
    DONE,
    INTERRUPTED,
    ITERATIONS,
    LOG_TO,
    METHOD,
    SET,
    TRUST,
    command,
    flag,
    one_of,
    option,
    output,
    positive,
    print_table,
)
from trial_ray.cli.train import default_folder
from trial_ray.errors import ConfigError, InfrastructureError
from trial_ray.runs.experiment import experiment_file
from trial_ray.runs.terminal import LOG_FILE, library_log, show

if TYPE_CHECKING:
    from trial_ray.sweeps.plan import SweepPlan
    from trial_ray.sweeps.results import SweepResult
    from trial_ray.sweeps.run import Sweep
    from trial_ray.sweeps.study import StudyPlan

STUDIES = ("table2", "table3", "study", "shape", "pair", "league")


@command(
    "search over settings with Ray Tune, or run a comparison of the paper",
    """examples:
  trial-ray sweep tuned_examples/sweeps/lambda_alpha.py     or sweeps/lambda_alpha, from an installed package
  trial-ray sweep tuned_examples/sweeps/lambda_alpha.py --iterations 2 --out sweeps/first --set num_engines=1
  trial-ray sweep tuned_examples/sweeps/lambda_alpha.py --resume sweeps/first
  trial-ray sweep tuned_examples/sweeps/dose_alfworld.py --method sdar   the values that SDAR shares, such as seeds
  trial-ray sweep tuned_examples/sweeps/lambda_alpha_optuna.py --log-to wandb --log-to mlflow
  trial-ray sweep table3 --dry-run                          the runs of a study, and their states
  trial-ray sweep table3 --seeds 1                          four methods, one seed each, on this machine
  trial-ray sweep table2 --scale paper --out results        on a GPU cluster (RAY_ADDRESS), see docs/cluster.md

FILE is Python that defines, as an experiment file does, `config` and `stop`; values of the config may be
tune.grid_search([...]) or tune.choice, tune.uniform, ... It may also define
  metric = "env_runners/success_rate", mode = "max"   which trial is best (these are the defaults)
  num_samples = 1                                     draws from the random values, or repeats of the grid
  scheduler                                           a Ray Tune scheduler: ASHAScheduler, PopulationBasedTraining
  search_alg                                          a Ray Tune searcher, such as OptunaSearch
  max_concurrent_trials                               default: as many as fit the machine
A grid of seeds, .debugging(seed=tune.grid_search([0, 1, 2])), makes every point a mean with an interval.
Every trial reserves its env runners, learners and engines together, so it starts only when all of them fit. At the end DIR
has results.csv, a map of two settings, and best.py for `trial-ray train`.

In place of FILE, a study of the paper compares methods and seeds:
  table2    GRPO, SERL, SDAR, GRPO+OPSD, RLSD and TRIAL on complete evaluation sets, by task family
  table3    GRPO, Uniform, Permuted and TRIAL: the controlled study of the turn profile
  study     all methods but OPSD, StepOPSD and AgentOPSD
  shape     the methods of table3 from several warm starts
  pair      TRIAL against GRPO
  league    GRPO, RLOO, DAPO, GSPO, CISPO, GiGPO, HGPO, G2PO, RFT, TRIAL, Uniform, SDAR, SERL and StepOPSD, none of them tuned
at a scale:
  tiny      the quickstart's model on 2 CPU cores, ALFWorld on generated games; about three minutes a run
  study     a tiny model with an informative hindsight signal, on 2 CPU cores; hours, in the background
  shape     `study` from four more warm starts
  guessing  the profiles in the guessing game of tuned_examples/own_environment.py
  webshop   the profiles of table3 in generated shops, as `study` in size; 2 CPU cores
  pretrained  SmolLM2-135M on 2 CPU cores, ALFWorld on generated games; an hour or two a run
  small     SmolLM2-135M on one GPU, both environments on generated games
  paper     Qwen2.5-3B-Instruct and Qwen3-1.7B, official data, 150 iterations; a GPU cluster
  FILE.py   your own scale; the scales above are tuned_examples/reproduce/*.py
At the end DIR has a run folder for each environment, backbone, method and seed, STUDY.csv and STUDY.tex, and in figures/ every
curve and the paper's Figure 3, and Figure 2 if the runs are evaluated while they train. After Ctrl-C the same command
continues a study.
""",
    option(
        "file", f"sweep file, or the name of a tuned example, or a study: {', '.join(STUDIES)}", "FILE", experiment_file
    ),
    METHOD,
    ITERATIONS,
    one_of(
        option("--out", "sweep folder (default: runs/<file>-<time>, for a study runs/<study>-<scale>)", "DIR", Path),
        option("--resume", "continue the sweep in DIR, as it was started", "DIR", Path),
    ),
    option("--scale", "scale of a study, see below (default: tiny)", "S"),
    option("--seeds", "seeds of every method of a study (default: the scale's)", "N", positive),
    flag("--dry-run", "print the trials and start nothing"),
    LOG_TO,
    TRUST,
    SET,
)
def sweep(args: Namespace) -> int | None:
    """Run or continue a sweep or a study, and print a table of the trials."""
    from trial_ray.runs.locks import folder_lock
    from trial_ray.runs.trackers import require_trackers
    from trial_ray.sweeps.outputs import write_outputs
    from trial_ray.sweeps.plan import load_plan
    from trial_ray.sweeps.run import Sweep, recorded_options
    from trial_ray.sweeps.study import plan_study, write_study

    name = str(args.file)
    is_study = name in STUDIES
    _check_options(args, is_study)
    require_trackers(args.log_to)
    given = (args.iterations, args.overrides, args.method)
    iterations, overrides, method = recorded_options(args.resume) if args.resume else given
    folder: Path | None = args.resume or args.out
    study = None
    if is_study:
        scale = args.scale or "tiny"
        study = plan_study(name, scale, args.seeds, iterations, overrides)
        plan, folder = study.sweep, folder or Path("runs") / f"{name}-{Path(scale).stem}"
    else:
        plan, folder = load_plan(args.file, iterations, overrides, method), folder or default_folder(args.file)
    folder = folder.resolve()
    searched = Sweep(plan, folder, tuple(args.log_to), tuple(sys.argv))
    if study:
        _print_runs(study, folder)
    elif args.dry_run:
        _print_space(plan)
    if args.dry_run:
        return None
    resume = args.resume is not None or (is_study and searched.is_begun)
    result = _complete_result(searched) if is_study else None
    if result is None:
        searched.require_folder(resume, args.trust)
    with folder_lock(folder, sys.argv):
        if result is None:
            if study:
                _make_warm_starts(study)
            result = run_sweep(searched, resume, args.verbose)
        written = write_study(study, result, folder) if study else write_outputs(plan, result, folder)
        return conclude(searched, result, written, "the same command" if study else f"--resume {folder}")


def _check_options(args: Namespace, is_study: bool) -> None:
    fixed = {
        "--method": args.method,
        "--iterations": args.iterations,
        "--set": args.overrides,
        "--log-to": args.log_to,
    }
    if args.resume and (names := [name for name, value in fixed.items() if value]):
        raise ConfigError(
            f"A sweep continues with the options that it was started with: leave out {' and '.join(names)}, or start a new sweep."
        )
    if not is_study and (args.scale or args.seeds):
        raise ConfigError(
            f"--scale and --seeds are options of a study; expected one of {', '.join(STUDIES)}, got {args.file}."
        )
    if is_study and args.method:
        raise ConfigError(f"--method is an option of a sweep file; the study {args.file} compares methods.")


def _complete_result(sweep: Sweep) -> SweepResult | None:
    """Return the result of a study whose trials have all finished; ``None`` if the folder has no such result.

    Raises:
        CheckpointError: the folder contains another study.
    """
    from trial_ray.sweeps.results import SweepResult

    if not (sweep.folder / "sweep.json").is_file():
        return None
    result = SweepResult.load(sweep.folder)
    if result.unfinished or result.failed:
        return None
    sweep.require_same_plan()
    return result


def _make_warm_starts(study: StudyPlan) -> None:
    """Train the warm-started models of a study one after the other, with progress bars; its trials load them from the cache."""
    from trial_ray.algorithms.startup import initial_policy

    for run in {(run.environment, run.backbone): run for run in study.runs.values()}.values():
        if run.config.warm_start is not None:
            initial_policy(run.config)


def run_sweep(sweep: Sweep, resume: bool, verbose: bool) -> SweepResult:
    """Run or continue a sweep in a new Ray session; the caller must have locked the sweep's folder.

    Args:
        sweep: sweep whose folder :meth:`Sweep.require_folder` has checked.
        resume: whether to continue the sweep in the folder.
        verbose: whether to show the output of libraries instead of writing it to a log.
    """
    import ray

    from trial_ray.algorithms.startup import require_inputs
    from trial_ray.runs.folder import interrupts_noted
    from trial_ray.runs.ray_session import ray_session
    from trial_ray.sweeps.run import Capacity

    plan, folder, console = sweep.plan, sweep.folder, output()
    require_inputs(plan.configs[0])
    show(f"sweep folder: {folder}")
    if not verbose:
        show(f"log: {folder / LOG_FILE} (output of Ray, the engines and other libraries)")
    with (
        remove_logs_unless_begun(sweep),
        interrupts_noted(lambda: [file.parent for file in folder.glob("*/run.json")]),
        nullcontext() if verbose else library_log(folder / LOG_FILE, console),
        ray_session(show=True),
    ):
        capacity = Capacity.of(plan.configs, ray.cluster_resources())
        capacity.require_one(local="RAY_ADDRESS" not in os.environ)
        at_once = min(capacity.trials, plan.max_concurrent_trials or capacity.trials)
        show(capacity.describe(plan.num_trials, at_once))
        return sweep.fit(at_once, resume=resume)


@contextmanager
def remove_logs_unless_begun(sweep: Sweep) -> Iterator[None]:
    """Remove the logs of a sweep that fails before it begins, so that its folder is empty and the command can be repeated."""
    try:
        yield
    except BaseException:
        if not sweep.is_begun:
            shutil.rmtree((sweep.folder / LOG_FILE).parent, ignore_errors=True)
        raise


def conclude(sweep: Sweep, result: SweepResult, written: Iterable[str], again: str) -> int:
    """Print the tables of an ended sweep, write its files and a report, and return the exit code.

    Args:
        sweep: sweep that has ended or was interrupted.
        result: results of the trials.
        written: iterator that writes the files, and yields one line per file.
        again: command or option that continues the sweep, which is printed if trials are unfinished.

    Raises:
        InfrastructureError: at least one trial failed, and none is unfinished.
    """
    from trial_ray.reports.page import leave_report

    console = output()
    console.print(result.table())
    if points := result.points_table():
        console.print(points)
    for line in written:
        show(line)
    leave_report(sweep.folder)
    if result.unfinished:
        show(f"{result.unfinished} trial(s) unfinished; continue with {again}")
        return INTERRUPTED
    if result.failed:
        raise InfrastructureError(
            f"{result.failed} of {len(result.trials)} trials failed; their errors are in {sweep.folder}."
        )
    return DONE


# -- tables of --dry-run -----------------------------------------------------------------------------------------------


def _print_runs(study: StudyPlan, folder: Path) -> None:
    """Print a table of the runs of a study, with one row per run."""
    from trial_ray.runs.folder import RunFolder

    rows = []
    for name, run in study.runs.items():
        splits = ", ".join(f"{split.split} ({split.tasks})" for split in run.splits)
        state = RunFolder(folder / name).state() if (folder / name / "run.json").is_file() else "new"
        rows.append((run.environment, run.backbone, run.method, run.seed, splits, state))
    print_table(study.title, ("environment", "backbone", "method", ">seed", "evaluated on", "state"), rows)


def _print_space(plan: SweepPlan) -> None:
    """Print a table of the settings that a sweep searches over, with one row per setting."""
    from rich.markup import escape

    rows = []
    for name, space in plan.spaces.items():
        values = (
            ", ".join(map(str, space["grid_search"]))
            if isinstance(space, dict)
            else space or "changed by the scheduler"
        )
        rows.append((name, escape(str(values))))
    print_table(f"{plan.num_trials} trials of {plan.path.name}", ("setting", "values"), rows)
