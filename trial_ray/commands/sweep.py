"""``trial-ray sweep FILE``: a Ray Tune search over an experiment's settings, ending with a table of its trials."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from trial_ray.commands import console as terminal
from trial_ray.commands.train import default_folder
from trial_ray.errors import InfrastructureError
from trial_ray.experiments.experiment import experiment_file

EPILOG = """examples:
  trial-ray sweep tuned_examples/sweeps/lambda_alpha.py     or sweeps/lambda_alpha, which an installed package has, too
  trial-ray sweep tuned_examples/sweeps/lambda_alpha.py --iterations 2 --out sweeps/first --set num_engines=1
  trial-ray sweep tuned_examples/sweeps/lambda_alpha.py --resume sweeps/first

FILE is Python that defines, as an experiment file does, `config` and `stop`; values of the config may be
tune.grid_search([...]) or tune.choice, tune.uniform, ... It may also define
  metric = "env_runners/success_rate", mode = "max"   which trial is best (these are the defaults)
  num_samples = 1                                     draws from the random values, or repeats of the grid
  scheduler                                           a Ray Tune scheduler, such as ASHAScheduler
  max_concurrent_trials                               else as many as the cluster holds
Every trial reserves its env runners, learners and engines together, so it starts only when all of them fit.
"""


def add_parser(subparsers: Any, common: argparse.ArgumentParser) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "sweep",
        help="search over settings with Ray Tune",
        description="Train one trial for each combination of settings and compare them.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[common],
    )
    parser.add_argument("file", type=experiment_file, metavar="FILE", help="sweep file, see below")
    parser.add_argument("--iterations", type=terminal.positive, metavar="N", help="iterations of a trial at most")
    folder = parser.add_mutually_exclusive_group()
    folder.add_argument("--out", type=Path, metavar="DIR", help="sweep folder (default: runs/<file>-<time>)")
    folder.add_argument("--resume", type=Path, metavar="DIR", help="continue the sweep in DIR")
    terminal.add_set_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Search; see the module's docstring."""
    from trial_ray.experiments.ray_session import ray_session
    from trial_ray.experiments.run_report import leave_report
    from trial_ray.experiments.sweep import Sweep

    sweep = Sweep.load(args.file, args.iterations, args.overrides)
    folder = (args.resume or args.out or default_folder(args.file)).expanduser().resolve()
    sweep.require_folder(folder, resume=args.resume is not None)
    console = terminal.output()
    console.print(f"sweep folder: {folder}", highlight=False, soft_wrap=True)
    with ray_session(args.verbose):
        result = sweep.fit(folder, resume=args.resume is not None)
    console.print(result.table())
    result.save(folder / "sweep.json")
    leave_report(folder, console)
    if result.unfinished:
        console.print(f"{result.unfinished} trial(s) unfinished; continue with --resume {folder}", soft_wrap=True)
        return terminal.INTERRUPTED
    if result.failed:
        raise InfrastructureError(
            f"{result.failed} of {len(result.trials)} trials failed; their errors are in {folder}."
        )
    return terminal.DONE
