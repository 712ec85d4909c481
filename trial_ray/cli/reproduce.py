"""``trial-ray reproduce NAME --scale S``: runs a comparison of the paper as a sweep over methods and seeds, and makes its table."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from trial_ray.cli.console import SET, TRUST, command, flag, option, output, positive, table
from trial_ray.errors import TrialRayError, first_line

if TYPE_CHECKING:
    from rich.table import Table

    from trial_ray.reproduction import StudySweep

NAMES = ("table2", "table3", "study", "shape", "pair")


@command(
    "run a comparison of the paper and make its table and figures",
    """examples:
  trial-ray reproduce table3 --scale tiny --dry-run         the runs, and how far they are
  trial-ray reproduce table3 --scale tiny --seeds 1         four methods, one seed each, on this machine
  trial-ray reproduce table2 --scale paper --out results    on a GPU cluster (RAY_ADDRESS), see docs/cluster.md

  table2    GRPO, SERL, SDAR, GRPO+OPSD, RLSD and TRIAL on complete evaluation sets, by task family
  table3    GRPO, Uniform, Permuted and TRIAL: the controlled study of the turn profile
  study     all methods but OPSD, StepOPSD and AgentOPSD
  shape     the methods of table3 from several warm starts
  pair      TRIAL against GRPO

  tiny      the quickstart's model on 2 CPU cores, ALFWorld on generated games; about three minutes a run
  study     a tiny model with an informative hindsight signal, on 2 CPU cores; hours, in the background
  shape     `study` from four more warm starts
  guessing  the profiles in the guessing game of tuned_examples/own_environment.py
  webshop   the profiles of table3 in generated shops, as `study` in size; 2 CPU cores
  pretrained  SmolLM2-135M on 2 CPU cores, ALFWorld on generated games; an hour or two a run
  pretrained_tools  the same with tool calls; about an hour for `pair`
  small     SmolLM2-135M on one GPU, both environments on generated games
  paper     Qwen2.5-3B-Instruct and Qwen3-1.7B, official data, 150 iterations; a GPU cluster
  FILE.py   your own scale; the scales above are tuned_examples/reproduce/*.py

DIR is the folder of a sweep: a run folder for each environment, backbone, method and seed, NAME.csv and NAME.tex, and in
figures/ every curve and the paper's Figure 3, and Figure 2 if the runs are evaluated while they train. After Ctrl-C the same
command continues.
""",
    option("name", f"one of {', '.join(NAMES)}", "NAME", choices=NAMES),
    option(
        "--scale",
        "tiny, study, shape, guessing, webshop, pretrained, pretrained_tools, small, paper, or FILE.py, see below",
        "S",
        required=True,
    ),
    option("--out", "where runs and results go (default: runs/<name>-<scale>)", "DIR", Path),
    option("--seeds", "seeds of every method (default: the scale's)", "N", positive),
    option("--iterations", "of every run (default: the scale's)", "N", positive),
    flag("--dry-run", "print the runs and how far they are; start nothing"),
    TRUST,
    SET,
)
def reproduce(args: Namespace) -> int | None:
    """Run or continue a comparison of the paper, and write its table and figures."""
    from trial_ray.cli.train import conclude, run_sweep
    from trial_ray.reproduction import STUDIES, StudySweep, load_scale, scale_file
    from trial_ray.runs.locks import folder_lock
    from trial_ray.sweeps.result import SweepResult
    from trial_ray.sweeps.tuner import DEFINITION, Sweep

    scale = load_scale(args.scale)
    file = StudySweep.plan(
        STUDIES[args.name], scale, scale_file(args.scale), args.seeds, args.iterations, args.overrides
    )
    folder = (args.out or Path("runs") / f"{args.name}-{Path(args.scale).stem}").resolve()
    output().print(_run_table(f"{args.name}: {STUDIES[args.name].title}", file, folder))
    if args.dry_run:
        return None
    sweep, begun = Sweep(file, folder, command=tuple(sys.argv)), (folder / DEFINITION).exists()
    result = SweepResult.load(folder) if (folder / "sweep.json").is_file() else None
    if result is not None and not (result.unfinished or result.failed):
        sweep.require_same_file()
    else:
        sweep.require_folder(begun, args.trust)
        result = None
    with folder_lock(folder, sys.argv):
        if result is None:
            _make_warm_starts(file)
            result = run_sweep(sweep, begun, args.verbose)
            result.save(folder)
        return conclude(sweep, result, _results(args.name, file, folder), "the same command")


def _make_warm_starts(file: StudySweep) -> None:
    """Make the warm starts one after the other, with progress bars; the trials then find them in the cache."""
    from trial_ray.algorithms.startup import initial_policy

    for run in {(run.environment, run.backbone): run for run in file.runs.values()}.values():
        if run.config.warm_start is not None:
            initial_policy(run.config)


def _results(name: str, file: StudySweep, folder: Path) -> list[str]:
    """Write the results and return a line for each file; a ``TrialRayError`` is returned as a line and does not end the command."""
    from trial_ray.reproduction import write_results

    try:
        return [f"written: {path}" for path in write_results(name, file, folder) if path.suffix != ".svg"]
    except TrialRayError as error:
        return [f"not all results were written: {first_line(error)}"]


def _run_table(title: str, file: StudySweep, folder: Path) -> Table:
    """Return a table with one row per run."""
    from trial_ray.reproduction import state

    rows = []
    for name, run in file.runs.items():
        splits = ", ".join(f"{played.split} ({played.evaluation_set})" for played in run.sets)
        rows.append((run.environment, run.backbone, run.method, run.seed, splits, state(folder / name)))
    title += f" ({len(rows)} runs of {file.stop['training_iteration']:g} iterations)"
    return table(title, ("environment", "backbone", "method", ">seed", "evaluated on", "state"), rows)
