"""``trial-ray reproduce NAME --scale S``: run what a table or figure of the paper compares, then make it."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trial_ray.cli import console as terminal
from trial_ray.errors import InfrastructureError
from trial_ray.files import make_folder

if TYPE_CHECKING:
    from rich.table import Table

    from trial_ray.reproduction import PlannedRun
    from trial_ray.reproduction.studies import Chosen

NAMES = ("study", "shape", "pair", "table2", "table3", "figure2", "figure3")
HELP = "run a comparison of the paper and make its table or figure"
EPILOG = """examples:
  trial-ray reproduce table3 --scale tiny --dry-run         what would be run, and what is done already
  trial-ray reproduce table3 --scale tiny --seeds 1         four methods, one seed each, on this machine
  trial-ray reproduce figure2 --scale tiny                  uses the runs of table3 that are there
  trial-ray reproduce table2 --scale paper --out results    on a GPU cluster (RAY_ADDRESS), see docs/cluster.md
  trial-ray reproduce table3 --scale small --minutes 9      nine minutes of it; again for the next nine

  table2    GRPO, SERL, SDAR, GRPO+OPSD, RLSD and TRIAL on complete evaluation sets, by task family
  table3    GRPO, Uniform, Permuted and TRIAL: the controlled study of the turn profile
  figure2   success on the evaluation set during training, mean turn score and spread of the profile in windows of 5 iterations
  figure3   turn weights by class of decision, and two policies on one game
  study     all methods at the scale `study`: final success, area under the learning curve, iterations to GRPO's success; first
            chooses each method's λ on games of its own
  shape     the controlled study from several warm starts
  pair      TRIAL against GRPO

  tiny      the quickstart's model on 2 CPU cores, ALFWorld on generated games; about three minutes a run
  study     a tiny model whose hindsight view knows better than it acts, on 2 CPU cores; hours, in the background
  shape     `study` from four more warm starts, with its λ
  guessing  the profiles in the guessing game of tuned_examples/own_environment.py
  webshop   the profiles of table3 in generated shops, as `study` in size; 2 CPU cores
  pretrained  SmolLM2-135M on 2 CPU cores, ALFWorld on generated games; an hour or two a run
  small     SmolLM2-135M on one GPU, both environments on generated games
  paper     Qwen2.5-3B-Instruct and Qwen3-1.7B, official data, 150 iterations; a GPU cluster
  FILE.py   a scale of your own; those above are tuned_examples/reproduce/*.py

Runs lie in DIR/runs and are shared by all tables and figures of one DIR. Ctrl-C finishes iterations and saves; the same command
skips what is done and continues what is unfinished from its last checkpoint. A run of another config is never mixed in.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("name", choices=NAMES, metavar="NAME", help=f"one of {', '.join(NAMES)}")
    parser.add_argument(
        "--scale",
        required=True,
        metavar="S",
        help="tiny, study, shape, guessing, webshop, pretrained, small, paper, or FILE.py, see below",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where runs and results go (default: runs/reproduce-<scale>)"
    )
    parser.add_argument(
        "--seeds", type=terminal.positive, metavar="N", help="seeds of every method (default: the scale's)"
    )
    parser.add_argument("--iterations", type=terminal.positive, metavar="N", help="of every run (default: the scale's)")
    parser.add_argument(
        "--minutes",
        type=terminal.positive,
        metavar="N",
        help="save everything and stop after about so many minutes; the same command continues",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the runs and how far they are; start nothing")
    terminal.add_options(parser, "--trust", "--set")


def run(args: argparse.Namespace) -> int:
    """Reproduce; see the module's docstring."""
    from trial_ray.reproduction import STUDIES, load_scale, plan_choice, plan_runs
    from trial_ray.runs.ownership import folder_lock

    deadline = None if args.minutes is None else time.time() + 60 * args.minutes
    study, scale = STUDIES[args.name], load_scale(args.scale)
    folder = (args.out or Path("runs") / f"reproduce-{Path(args.scale).stem}").resolve()
    options: dict[str, Any] = {"iterations": args.iterations, "overrides": args.overrides}
    trials = plan_choice(study, scale, folder, **options)
    plan = partial(plan_runs, study, scale, folder, seeds=args.seeds, **options)
    plan()  # what is wrong with the input is said before a folder is made
    with nullcontext() if args.dry_run else folder_lock(folder, sys.argv):
        return _reproduce(args, study.title, folder, deadline, trials, plan)


def _reproduce(
    args: argparse.Namespace,
    title: str,
    folder: Path,
    deadline: float | None,
    trials: Sequence[PlannedRun],
    plan: Callable[..., list[PlannedRun]],
) -> int:
    console = terminal.output()
    chosen, tried = (None, []) if not trials else _choose(args, trials, folder, deadline)
    runs = plan(chosen=chosen)
    # The configs of these runs follow from the choice.
    states = ["new"] * len(runs) if trials and chosen is None else [run.state() for run in runs]
    console.print(run_table(f"{args.name}: {title}", runs, states))
    if args.dry_run:
        return terminal.DONE
    if trials and chosen is None:
        return _tell_unfinished(trials)
    failed = train_what_is_missing(args, runs, states, folder, deadline)
    unfinished = [run for run in runs if run.state() != "done"]
    if len(unfinished) < len(runs):
        from trial_ray.reproduction.artefacts import assemble

        for path in assemble(args.name, runs, folder, tried):
            terminal.show(f"written: {path}")
    _require_none(failed, runs)
    return _tell_unfinished(runs) if unfinished else terminal.DONE


def _tell_unfinished(runs: Sequence[PlannedRun]) -> int:
    unfinished = sum(run.state() != "done" for run in runs)
    terminal.output().print(f"{unfinished} of {len(runs)} runs are unfinished; the same command continues them")
    return terminal.INTERRUPTED


def _choose(
    args: argparse.Namespace, trials: Sequence[PlannedRun], folder: Path, deadline: float | None
) -> tuple[Chosen | None, list[dict[str, Any]]]:
    """Make the runs that a setting is chosen out of, and choose; nothing, where they are not all done after that."""
    from trial_ray.reproduction import choose

    console, states = terminal.output(), [run.state() for run in trials]
    console.print(run_table(f"{args.name}: the runs that a setting is chosen out of", trials, states))
    if not args.dry_run:
        _require_none(train_what_is_missing(args, trials, states, folder, deadline), trials)
    if any(run.state() != "done" for run in trials):
        console.print("The study's own runs begin when these are done; below they stand with the setting's default.")
        return None, []
    chosen, tried = choose(trials)
    values = ", ".join(f"{method} {value:g}" for (_, _, method), value in chosen.items())
    console.print(f"chosen: {values}", highlight=False)
    return chosen, tried


def _require_none(failed: Sequence[str], runs: Sequence[PlannedRun]) -> None:
    if failed:
        raise InfrastructureError(
            f"{len(failed)} of {len(runs)} runs failed ({', '.join(failed[:3])}); each run folder's error.log says why. "
            "The same command tries them again."
        )


def train_what_is_missing(
    args: argparse.Namespace, runs: Sequence[PlannedRun], states: Sequence[str], folder: Path, deadline: float | None
) -> list[str]:
    """Run through Tune what is not done; returns the names of the runs that failed."""
    if all(state == "done" for state in states):
        return []
    from trial_ray.reproduction.execution import execute, make_warm_starts, write_plan
    from trial_ray.reproduction.studies import scale_file
    from trial_ray.runs.folder import interrupts_noted
    from trial_ray.runs.ray_session import ray_session

    make_folder(folder)
    write_plan(folder, args.name, runs)
    try:
        make_warm_starts(runs, deadline)
        with interrupts_noted(lambda: [run.folder for run in runs]), ray_session(args.verbose):
            return execute(runs, scale_file(args.scale), folder, args.trust, deadline)
    finally:
        write_plan(folder, args.name, runs)


def run_table(title: str, runs: Sequence[PlannedRun], states: Sequence[str]) -> Table:
    """One row a run."""
    from rich.table import Table

    counts = Counter(states)
    summary = ", ".join(f"{counts[state]} {state}" for state in ("done", "unfinished", "new") if counts[state])
    table = Table(title=f"{title} ({len(runs)} runs: {summary})")
    for header in ("environment", "backbone", "method", "seed", "trained", "evaluated on", "state"):
        table.add_column(header, justify="right" if header in ("seed", "trained") else "left")
    for run, state in zip(runs, states, strict=True):
        splits = ", ".join(f"{evaluated.split} ({evaluated.panel})" for evaluated in run.sets)
        trained = f"{run.trained} of {run.iterations}"
        table.add_row(run.environment, run.backbone, run.method, str(run.seed), trained, splits, state)
    return table


REPRODUCE = terminal.Command(HELP, EPILOG, add_arguments, run)
