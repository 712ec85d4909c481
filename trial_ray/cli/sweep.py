"""``trial-ray sweep FILE``: a Ray Tune search over an experiment's settings, ending with a table of its trials."""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from trial_ray.cli import console as terminal
from trial_ray.cli.train import default_folder
from trial_ray.errors import ConfigError, InfrastructureError
from trial_ray.runs.experiment import experiment_file

if TYPE_CHECKING:
    from rich.console import Console

    from trial_ray.sweeps.result import SweepResult
    from trial_ray.sweeps.tuner import Sweep

HELP = "search over settings with Ray Tune"
EPILOG = """examples:
  trial-ray sweep tuned_examples/sweeps/lambda_alpha.py     or sweeps/lambda_alpha, which an installed package has, too
  trial-ray sweep tuned_examples/sweeps/lambda_alpha.py --iterations 2 --out sweeps/first --set num_engines=1
  trial-ray sweep tuned_examples/sweeps/lambda_alpha.py --resume sweeps/first
  trial-ray sweep tuned_examples/sweeps/lambda_alpha_optuna.py --log-to wandb --log-to mlflow

FILE is Python that defines, as an experiment file does, `config` and `stop`; values of the config may be
tune.grid_search([...]) or tune.choice, tune.uniform, ... It may also define
  metric = "env_runners/success_rate", mode = "max"   which trial is best (these are the defaults)
  num_samples = 1                                     draws from the random values, or repeats of the grid
  scheduler                                           a Ray Tune scheduler: ASHAScheduler, PopulationBasedTraining
  search_alg                                          a Ray Tune searcher, such as OptunaSearch
  max_concurrent_trials                               else as many as fit the machine
A grid of seeds, .debugging(seed=tune.grid_search([0, 1, 2])), makes every point a mean with an interval.
Every trial reserves its env runners, learners and engines together, so it starts only when all of them fit. DIR holds at
the end results.csv, pictures, and best.py, which `trial-ray train` takes.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("file", type=experiment_file, metavar="FILE", help="sweep file, see below")
    parser.add_argument("--iterations", type=terminal.positive, metavar="N", help="iterations of a trial at most")
    folder = parser.add_mutually_exclusive_group()
    folder.add_argument("--out", type=Path, metavar="DIR", help="sweep folder (default: runs/<file>-<time>)")
    folder.add_argument("--resume", type=Path, metavar="DIR", help="continue the sweep in DIR, as it was begun")
    terminal.add_options(parser, "--log-to", "--trust", "--set")


def run(args: argparse.Namespace) -> int:
    """Search; see the module's docstring."""
    import os

    import ray

    from trial_ray.runs.folder_lock import folder_lock
    from trial_ray.runs.ray_session import ray_session
    from trial_ray.runs.terminal import LOG_FILE, library_log
    from trial_ray.runs.trackers import require_trackers
    from trial_ray.sweeps.capacity import Capacity
    from trial_ray.sweeps.file import SweepFile
    from trial_ray.sweeps.tuner import Sweep, recorded_options

    _check_resume(args)
    require_trackers(args.log_to)
    options = recorded_options(args.resume) if args.resume else (args.iterations, args.overrides)
    file = SweepFile.load(args.file, *options)
    folder = (args.resume or args.out or default_folder(args.file)).resolve()
    sweep = Sweep(file, folder, tuple(args.log_to), tuple(sys.argv))
    sweep.require_folder(resume=args.resume is not None, trust=args.trust)
    console = terminal.output()
    terminal.show(f"sweep folder: {folder}")
    if not args.verbose:
        terminal.show(f"log: {folder / LOG_FILE} (what Ray, the engines and other libraries write)")
    with folder_lock(folder, sys.argv):
        with (
            nullcontext() if args.verbose else library_log(folder / LOG_FILE, console),
            ray_session(show=True),
        ):
            capacity = Capacity.of(file.configs(), ray.cluster_resources())
            capacity.require_one(local="RAY_ADDRESS" not in os.environ)
            at_once = sweep.at_once(capacity)
            terminal.show(capacity.describe(file.num_trials, at_once))
            result = sweep.fit(at_once, resume=args.resume is not None)
        return _conclude(sweep, result, console)


def _check_resume(args: argparse.Namespace) -> None:
    given = {"--iterations": args.iterations, "--set": args.overrides, "--log-to": args.log_to}
    if args.resume and (names := [name for name, value in given.items() if value]):
        raise ConfigError(
            f"A sweep continues with its own options: leave out {' and '.join(names)}, or start a new sweep."
        )


def _conclude(sweep: Sweep, result: SweepResult, console: Console) -> int:
    from trial_ray.runs.report import leave_report
    from trial_ray.sweeps.outputs import write_outputs

    written = list(write_outputs(sweep.file, result, sweep.folder))
    console.print(result.table())
    if points := result.points_table():
        console.print(points)
    for line in written:
        terminal.show(line)
    leave_report(sweep.folder, console)
    if result.unfinished:
        terminal.show(f"{result.unfinished} trial(s) unfinished; continue with --resume {sweep.folder}")
        return terminal.INTERRUPTED
    if result.failed:
        raise InfrastructureError(
            f"{result.failed} of {len(result.trials)} trials failed; their errors are in {sweep.folder}."
        )
    return terminal.DONE
