"""``trial-ray replay RUN --iteration K``: make an update of a run again from its recorded rollouts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from trial_ray.algorithms.methods import method_names
from trial_ray.cli import console as terminal

if TYPE_CHECKING:
    from rich.table import Table

    from trial_ray.runs.replay import ReplayedUpdate

HELP = "make an update again from its recorded rollouts, also with another method"
EPILOG = """examples:
  trial-ray replay runs/my-run --iteration 1                         the same update: same weights, same metrics
  trial-ray replay runs/my-run --iteration 1 --method grpo           what GRPO makes of the same rollouts
  trial-ray replay runs/my-run --iteration 1 --set hindsight_coeff=0.1 --set hindsight_start_iteration=1
  trial-ray replay runs/my-run --iteration 1 --set training_folder=replayed     and record each turn's weights there

An update begins from the checkpoint of the iteration before it; the first one begins from the initial model. `train` keeps the
newest two checkpoints, one every 10 iterations: to replay any iteration, train with --checkpoint-every 1 --keep-checkpoints N.
With nothing changed, the weights are the same bit for bit on the CPU that made them. Neither environments nor engines start, and
the run folder is only read.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="run folder")
    parser.add_argument(
        "--iteration", type=terminal.positive, required=True, metavar="K", help="whose update is made again"
    )
    names = ", ".join(method_names())
    parser.add_argument("--method", metavar="NAME", help=f"with another method: {names}, or a FILE.py of yours")
    terminal.add_options(parser, "--env-adapter", "--trust", "--set")


def run(args: argparse.Namespace) -> int:
    """Replay; see the module's docstring."""
    from trial_ray.environments.registry import load_adapters
    from trial_ray.runs.folder import RunFolder
    from trial_ray.runs.ray_session import ray_session
    from trial_ray.runs.replay import Replay

    folder = RunFolder.reopen(args.run_folder)
    adapters = load_adapters(args.env_adapters)
    replay = Replay.of(folder, args.iteration, args.method, args.overrides, adapters, trust=args.trust)
    console = terminal.output()
    with ray_session(args.verbose):
        found = replay.play()
    console.print(metrics_table(found))
    for line in weights_lines(found, replay.changed):
        terminal.show(line)
    return terminal.DONE


def metrics_table(found: ReplayedUpdate) -> Table:
    """One row a metric: what the run logged, what the replay logged, and the difference."""
    from rich.table import Table

    title = f"iteration {found.record.iteration}: {len(found.record.group_ids)} groups of rollouts"
    table = Table(title=title)
    table.add_column("metric")
    for header in ("run", "replay", "difference"):
        table.add_column(header, justify="right")
    for name in sorted({*found.recorded_metrics, *found.metrics}):
        ours, theirs = found.metrics.get(name), found.recorded_metrics.get(name)
        difference = "" if ours is None or theirs is None else f"{ours - theirs:.3g}"
        table.add_row(name, *("" if value is None else f"{value:.6g}" for value in (theirs, ours)), difference)
    return table


def weights_lines(found: ReplayedUpdate, changed: bool) -> list[str]:
    """Checksums of the weights before and after."""
    verdict = "the same weights, bit for bit" if found.same_weights else "other weights"
    if not found.same_weights and not changed:
        verdict += ": sums were rounded otherwise, on another device or with another number of threads"
    return [
        f"weights before: {found.record.weights_before}",
        f"weights after:  {found.record.weights_after} (run)",
        f"                {found.weights} (replay): {verdict}",
    ]
