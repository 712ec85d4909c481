"""Commands that read the folder of a run: ``report``, ``inspect``, ``export`` and ``replay``."""

from __future__ import annotations

import argparse
import os
import sys
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

from trial_ray.cli import console as terminal
from trial_ray.errors import UserInputError

if TYPE_CHECKING:
    from rich.table import Table

    from trial_ray.reports.run import RecordedRun
    from trial_ray.runs.replay import ReplayedUpdate


# -- report ------------------------------------------------------------------------------------------------------------


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``report``."""
    parser.add_argument(
        "runs",
        type=terminal.readable(0),
        nargs="+",
        metavar="RUN",
        help="folder of a run or of a sweep, or a run's URI",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="the page (default: report.html in the folder, here with several)",
    )
    parser.add_argument("--figures", type=Path, metavar="DIR", help="also write every chart as PNG and SVG into DIR")


def report(args: argparse.Namespace) -> int:
    """Write one HTML page of what runs learned, did and cost."""
    from trial_ray.reports.report import REPORT_FILE, load_groups, write_report

    groups = load_groups(args.runs)
    runs = [run for group in groups for run in group.runs]
    title = args.runs[0].resolve().name if len(args.runs) == 1 else f"{len(runs)} runs"
    output = args.output or (args.runs[0] / REPORT_FILE if len(args.runs) == 1 else Path(REPORT_FILE))
    for run in runs:
        for reason in run.reasons():
            terminal.show(f"missing: {run.name}: {reason}")
    written = [write_report(groups, title, output)]
    if args.figures:
        from trial_ray.reports.plots import write_figures

        written = [*write_figures(groups, args.figures), *written]
    for path in written:
        terminal.show(f"written: {path} ({path.stat().st_size:,} bytes)")
    return terminal.DONE


REPORT = terminal.Command(
    "one HTML page of what runs learned and cost",
    """examples:
  trial-ray report runs/my-run                              writes runs/my-run/report.html
  trial-ray report runs/trial-0 runs/trial-1 runs/grpo-0 runs/grpo-1 --output comparison.html
  trial-ray report runs/my-sweep                            one curve a trial
  trial-ray report runs/my-run --figures figures            the charts as PNG and SVG as well

RUN is the folder of a run or of a sweep. Runs that differ by seed alone are shown as one curve with an interval; others are
compared, paired by seed and task. The page loads nothing: it can be sent, and opened without a network.
`train` and `sweep` leave such a page in their folders.
""",
    add_report_arguments,
    report,
)


# -- inspect -----------------------------------------------------------------------------------------------------------

CHOSEN_RUNS = 2
"""Most runs on one page: two stand side by side."""


def add_inspect_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``inspect``."""
    parser.add_argument(
        "run_folders",
        type=terminal.readable(1),
        nargs="+",
        metavar="RUN",
        help="run folder or URI; two to compare them",
    )
    parser.add_argument(
        "--iteration", type=terminal.positive, metavar="N", help="this one alone (default: all; with --text the newest)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the page (default: viewer in the first RUN)")
    parser.add_argument("--open", action="store_true", help="open the page in a browser where there is a display")
    parser.add_argument(
        "--text", action="store_true", help="list the trajectories of an iteration in the terminal instead"
    )
    parser.add_argument(
        "--show", type=terminal.positive, metavar="K", help="with --text: print trajectory number K of the iteration"
    )
    terminal.add_options(parser, "--env-adapter")
    terminal.add_removed(
        parser, "--export", "datasets, pandas and DuckDB read the recorded Parquet (docs/runs.md#reading-them)"
    )


def inspect(args: argparse.Namespace) -> int:
    """Write a page on which a person reads what a run recorded, or print the same."""
    from trial_ray.environments.registry import load_adapters
    from trial_ray.files import visible
    from trial_ray.reports.run import open_run

    _check(args)
    adapters = load_adapters(args.env_adapters)
    names = _names(args.run_folders)
    runs = [
        open_run(folder, name, args.iteration, adapters) for folder, name in zip(args.run_folders, names, strict=True)
    ]
    notes = [f"{run.name}: {reason}" for run in runs for reason in run.reasons("config", "tokens")]
    if args.text:
        _print(runs[0], args.show)
    else:
        count, place = _write_page(runs, (args.out or args.run_folders[0] / "viewer").resolve(), notes, args.open)
    for note in notes:
        terminal.errors().print(visible(f"note: {note}"), markup=False, highlight=False)
    if not args.text:
        terminal.show(visible(f"{count:,} trajectories: {place}"))
    return terminal.DONE


def _check(args: argparse.Namespace) -> None:
    if len(args.run_folders) > (1 if args.text else CHOSEN_RUNS):
        expected = "one RUN with --text" if args.text else "one or two RUN folders"
        raise UserInputError(f"Expected {expected}; found {len(args.run_folders)}.")
    if args.show and not args.text:
        raise UserInputError("--show K prints a trajectory in the terminal; give --text with it.")
    if args.text and (args.out or args.open):
        raise UserInputError("--text prints in the terminal; --out and --open are of the page. Give one or the other.")


def _names(folders: list[Path]) -> list[str]:
    """The folders' names, or their paths where those are the same."""
    resolved = [folder.resolve() for folder in folders]
    names = [folder.name for folder in resolved]
    return names if len(set(names)) == len(names) else [str(folder) for folder in resolved]


def _write_page(runs: list[RecordedRun], target: Path, notes: list[str], wanted_open: bool) -> tuple[int, Path]:
    """Number of trajectories, and the page."""
    from rich.progress import Progress

    from trial_ray.reports.viewer import write_viewer

    with Progress(console=terminal.errors(), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("iterations", total=sum(len(run.recorded) for run in runs))
        written = write_viewer(runs, target, notes, lambda: progress.advance(task))
    notes[:] = written.notes
    display = sys.platform in ("darwin", "win32") or not {"DISPLAY", "WAYLAND_DISPLAY"}.isdisjoint(os.environ)
    if wanted_open and not (display and webbrowser.open(written.page.as_uri())):
        notes.append("there is no display here; copy the folder to where there is one.")
    return written.trajectories, written.page


def _print(run: RecordedRun, show: int | None) -> None:
    from trial_ray.reports.recorded import list_trajectories, print_trajectory

    (iteration,) = run.recorded[-1:]
    recorded = run.read(iteration)
    console = terminal.output()
    if show is None:
        console.print(list_trajectories(recorded, f"iteration {iteration}"))
    elif show > len(recorded):
        raise UserInputError(f"Iteration {iteration} has {len(recorded)} trajectories; found --show {show}.")
    else:
        for part in print_trajectory(recorded[show - 1], run.tokens):
            console.print(part, soft_wrap=True)


INSPECT = terminal.Command(
    "read the trajectories of a run",
    """examples:
  trial-ray inspect runs/my-run                              write the page RUN/viewer/index.html
  trial-ray inspect runs/my-run --open                       and open it
  trial-ray inspect runs/grpo runs/trial --out compared      two runs, side by side on the same tasks
  trial-ray inspect runs/my-run --text --iteration 3         list the trajectories of an iteration in the terminal
  trial-ray inspect runs/my-run --text --iteration 3 --show 7    print its trajectory number 7 with its prompts

The page needs no server and no network. The records are Parquet for pandas, DuckDB and datasets (docs/runs.md#reading-them).
""",
    add_inspect_arguments,
    inspect,
)


# -- export ------------------------------------------------------------------------------------------------------------


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``export``."""
    parser.add_argument(
        "checkpoint",
        type=terminal.readable(1),
        metavar="CHECKPOINT",
        help="a checkpoint, or a run folder (its newest), or the URI of one",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="a new folder")
    parser.add_argument("--adapter", action="store_true", help="copy the adapter alone, in the format of peft")


def export(args: argparse.Namespace) -> int:
    """Copy the Hugging Face model out of a checkpoint."""
    from trial_ray.runs.checkpoints import export_model

    target = export_model(args.checkpoint, args.folder, adapter=args.adapter)
    terminal.show(f"{'adapter' if args.adapter else 'model'}: {target}")
    return terminal.DONE


EXPORT = terminal.Command(
    "copy the model out of a checkpoint, in Hugging Face format",
    """examples:
  trial-ray export runs/my-run exported/agent
  trial-ray export runs/my-run/checkpoints/000020 exported/agent
  trial-ray export runs/my-lora-run exported/adapter --adapter

DIR then loads with transformers (AutoModelForCausalLM.from_pretrained) and serves with vLLM (vllm serve DIR). Where a run
trained an adapter (lora_rank), it is merged into the weights; --adapter copies it alone, for peft.
""",
    add_export_arguments,
    export,
)


# -- replay ------------------------------------------------------------------------------------------------------------


def add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``replay``."""
    parser.add_argument("run_folder", type=terminal.readable(None), metavar="RUN", help="run folder or URI")
    parser.add_argument(
        "--iteration", type=terminal.positive, required=True, metavar="K", help="whose update is made again"
    )
    terminal.add_options(parser, "--method", "--env-adapter", "--trust", "--set")


def replay(args: argparse.Namespace) -> int:
    """Make an update of a run again from its recorded rollouts."""
    from trial_ray.environments.registry import load_adapters
    from trial_ray.runs.folder import RunFolder
    from trial_ray.runs.ray_session import ray_session
    from trial_ray.runs.replay import Replay

    folder = RunFolder.reopen(args.run_folder)
    adapters = load_adapters(args.env_adapters)
    update = Replay.of(folder, args.iteration, args.method, args.overrides, adapters, trust=args.trust)
    console = terminal.output()
    with ray_session(args.verbose):
        found = update.play()
    console.print(metrics_table(found))
    for line in weights_lines(found, update.changed):
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


REPLAY = terminal.Command(
    "make an update again from its recorded rollouts, also with another method",
    """examples:
  trial-ray replay runs/my-run --iteration 1                         the same update: same weights, same metrics
  trial-ray replay runs/my-run --iteration 1 --method grpo           what GRPO makes of the same rollouts
  trial-ray replay runs/my-run --iteration 1 --set hindsight_coeff=0.1 --set hindsight_start_iteration=1
  trial-ray replay runs/my-run --iteration 1 --set training_folder=replayed     and record each turn's weights there

An update begins from the checkpoint of the iteration before it; the first one begins from the initial model. `train` keeps the
newest two checkpoints, one every 10 iterations: to replay any iteration, train with --checkpoint-every 1 --keep-checkpoints N.
With nothing changed, the weights are the same bit for bit on the CPU that made them. Neither environments nor engines start, and
the run folder is only read.
""",
    add_replay_arguments,
    replay,
)
