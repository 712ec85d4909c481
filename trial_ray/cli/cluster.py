"""Commands that ask a Ray cluster for its runs: ``status`` and ``logs``."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from trial_ray.cli import console as terminal
from trial_ray.errors import InfrastructureError

if TYPE_CHECKING:
    from rich.table import Table

    from trial_ray.runs.cluster_runs import ClusterRun

ADDRESS = "the cluster's dashboard, such as http://127.0.0.1:8265 (default: RAY_API_SERVER_ADDRESS)"


def add_status_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``status``."""
    parser.add_argument("address", nargs="?", metavar="ADDRESS", help=ADDRESS)
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of a table")


def status(args: argparse.Namespace) -> int:
    """List the runs on a cluster."""
    from trial_ray.runs.cluster_runs import list_runs
    from trial_ray.runs.dashboard import Dashboard

    dashboard = Dashboard.find(args.address)
    runs = list_runs(dashboard, _note)
    if args.json:
        terminal.show(json.dumps([run.to_dict() for run in runs], indent=2))
    elif not runs:
        terminal.show(f"no run on the cluster at {dashboard.address}")
    else:
        terminal.output().print(runs_table(runs))
        for line in [line for run in runs for line in _lines(run)]:
            terminal.show(line)
    return terminal.DONE


def _note(line: str) -> None:
    from trial_ray.reports.recorded import visible

    terminal.errors().print(visible(f"note: {line}"), markup=False, highlight=False)


def runs_table(runs: list[ClusterRun]) -> Table:
    """One row a run."""
    from rich.table import Table
    from rich.text import Text

    from trial_ray.reports.recorded import visible
    from trial_ray.runs.status import LOSS
    from trial_ray.runs.terminal import describe, duration

    table = Table()
    for header in ("run", "state", "done", "each", "left", "last iteration", "actors alive"):
        table.add_column(header, overflow="fold")
    for run in runs:
        reported = run.status
        metrics = describe(dict(reported.metrics)) + (
            f"  loss {reported.metrics[LOSS]:.3g}" if LOSS in reported.metrics else ""
        )
        cells = (
            run.name,
            reported.state,
            f"{reported.done}{'' if reported.total is None else f' of {reported.total}'} {reported.unit}s",
            "" if reported.seconds is None else f"{reported.seconds:.1f} s",
            "" if reported.seconds_left is None else duration(reported.seconds_left),
            metrics.strip(),
            _actors(run),
        )
        table.add_row(*(Text(visible(cell)) for cell in cells))
    return table


def _actors(run: ClusterRun) -> str:
    """Living ones by kind and node."""
    from trial_ray.runs.dashboard import ALIVE

    living = [actor for actor in run.actors if actor.state == ALIVE]
    counts = Counter((actor.name.rstrip("0123456789").strip(), actor.node) for actor in living)
    return "\n".join(f"{kind}: {count} on {node}" for (kind, node), count in sorted(counts.items()))


def _lines(run: ClusterRun) -> list[str]:
    from trial_ray.reports.recorded import visible

    submitted = f" ({run.submission})" if run.submission else ""
    driver = f", driver {run.pid} on {run.driver}" if run.driver else ""
    place = f"{run.name}: {run.status.run}, job {run.job}{submitted}{driver}"
    return [visible(line) for line in (place, *(f"{run.name}: warning: {text}" for text in run.warnings()))]


STATUS = terminal.Command(
    "runs on a Ray cluster: iterations, time left, actors, last metrics",
    """examples:
  trial-ray status http://127.0.0.1:8265             from any machine that reaches the dashboard, e.g. through ssh -L
  trial-ray status --json http://127.0.0.1:8265

Runs of `train`, `reproduce` and `sweep`, submitted as jobs or not. No run waits for this command. `ended` is a run whose driver
was killed. RAY_AUTH_MODE=token and RAY_AUTH_TOKEN are those of Ray's own commands.
""",
    add_status_arguments,
    status,
)


def add_logs_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``logs``."""
    parser.add_argument("run_name", metavar="NAME", help="name, folder or job of a run, as `trial-ray status` shows it")
    parser.add_argument("address", nargs="?", metavar="ADDRESS", help=ADDRESS)
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder of the files (default: logs/actors in the run's folder, or NAME-logs where that is not here)",
    )


def logs(args: argparse.Namespace) -> int:
    """Fetch the logs of a run's actors from all nodes."""
    from trial_ray.runs.cluster_runs import LOGS, choose_run, collect_logs, list_runs
    from trial_ray.runs.dashboard import Dashboard

    dashboard = Dashboard.find(args.address)
    run = choose_run(list_runs(dashboard, _note), args.run_name)
    here = Path(run.status.run)
    folder = args.out or (here / LOGS if here.is_dir() else Path(f"{run.name}-logs"))
    written, missing = collect_logs(dashboard, run.job, run.status.actors, folder, run.submission)
    for line in missing:
        _note(line)
    if not written:
        raise InfrastructureError(f"No node has logs of {run.name}.")
    terminal.show(f"{len(written)} files: {folder}")
    return terminal.DONE


LOGS = terminal.Command(
    "fetch what a run's actors printed, on all nodes of a Ray cluster",
    """examples:
  trial-ray logs my-run http://127.0.0.1:8265 --out my-run-logs
  trial-ray logs /shared/runs/my-run http://127.0.0.1:8265

A run that fails on a cluster does so itself. RUN/logs/libraries.log holds the same output as far as it reached the driver.
""",
    add_logs_arguments,
    logs,
)
