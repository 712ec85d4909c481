"""``trial-ray inspect RUN``: a page on which a person reads what a run recorded, the same in the terminal, or exported."""

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
    from trial_ray.reports.records import RunRecord

HELP = "read the trajectories of a run"
EPILOG = """examples:
  trial-ray inspect runs/my-run                              write the page RUN/viewer/index.html
  trial-ray inspect runs/my-run --open                       and open it
  trial-ray inspect runs/grpo runs/trial --out compared      two runs, side by side on the same tasks
  trial-ray inspect runs/my-run --text --iteration 3         list the trajectories of an iteration in the terminal
  trial-ray inspect runs/my-run --text --iteration 3 --show 7    print its trajectory number 7 with its prompts
  trial-ray inspect runs/my-run --export atif --out atif         one ATIF document (JSON) a trajectory
  trial-ray inspect runs/my-run --export datasets --out hub      a folder for datasets.load_dataset

The page needs no server and no network. The records are Parquet, which pandas, DuckDB and pyarrow read as well.
"""
FORMATS = ("atif", "datasets")
CHOSEN_RUNS = 2
"""Most runs on one page: two stand side by side."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("run_folders", type=Path, nargs="+", metavar="RUN", help="run folder; two to compare them")
    parser.add_argument(
        "--iteration", type=terminal.positive, metavar="N", help="this one alone (default: all; with --text the newest)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of the page (default: viewer in the first RUN) or of the export"
    )
    parser.add_argument("--open", action="store_true", help="open the page in a browser where there is a display")
    parser.add_argument(
        "--text", action="store_true", help="list the trajectories of an iteration in the terminal instead"
    )
    parser.add_argument(
        "--show", type=terminal.positive, metavar="K", help="with --text: print trajectory number K of the iteration"
    )
    parser.add_argument(
        "--export",
        choices=FORMATS,
        metavar="FORMAT",
        help="write the trajectories into the new folder --out instead: atif (Agent Trajectory Interchange Format) or datasets "
        "(Parquet and a card for Hugging Face datasets)",
    )
    terminal.add_options(parser, "--env-adapter")


def run(args: argparse.Namespace) -> int:
    """Write the page, or print."""
    from trial_ray.environments.registry import load_adapters
    from trial_ray.runs.reader import open_run

    _check(args)
    adapters = load_adapters(args.env_adapters)
    names = _names(args.run_folders)
    runs = [
        open_run(folder, name, args.iteration, adapters) for folder, name in zip(args.run_folders, names, strict=True)
    ]
    notes = [f"{run.name}: {reason}" for run in runs for reason in run.missing]
    if args.export:
        _export(runs[0], args.export, args.out, notes)
    elif args.text:
        _print(runs[0], args.show, notes)
    else:
        _write_page(runs, (args.out or args.run_folders[0] / "viewer").resolve(), notes, args.open)
    return terminal.DONE


def _check(args: argparse.Namespace) -> None:
    alone = "--export" if args.export else "--text" if args.text else ""
    if len(args.run_folders) > (1 if alone else CHOSEN_RUNS):
        expected = f"one RUN with {alone}" if alone else "one or two RUN folders"
        raise UserInputError(f"Expected {expected}; found {len(args.run_folders)}.")
    if args.export and (args.text or args.open or not args.out):
        raise UserInputError(
            "--export FORMAT writes into the folder --out DIR: name it, and give neither --text nor --open."
        )
    if args.show and not args.text:
        raise UserInputError("--show K prints a trajectory in the terminal; give --text with it.")
    if args.text and (args.out or args.open):
        raise UserInputError("--text prints in the terminal; --out and --open are of the page. Give one or the other.")


def _names(folders: list[Path]) -> list[str]:
    """The folders' names, or their paths where those are the same."""
    resolved = [folder.resolve() for folder in folders]
    names = [folder.name for folder in resolved]
    return names if len(set(names)) == len(names) else [str(folder) for folder in resolved]


def _write_page(runs: list[RunRecord], target: Path, notes: list[str], wanted_open: bool) -> None:
    from rich.progress import Progress

    from trial_ray.reports.recorded import visible
    from trial_ray.reports.viewer import write_viewer

    with Progress(console=terminal.errors(), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("iterations", total=sum(len(run.recorded) for run in runs))
        written = write_viewer(runs, target, notes, lambda: progress.advance(task))
    opened = wanted_open and _has_display() and webbrowser.open(written.page.as_uri())
    hint = ["there is no display here; copy the folder to where there is one."] if wanted_open and not opened else []
    _tell([*written.notes, *hint])
    terminal.show(visible(f"{written.trajectories:,} trajectories: {written.page}"))


def _export(run: RunRecord, format_name: str, folder: Path, notes: list[str]) -> None:
    from trial_ray.reports.exports import export_trajectories
    from trial_ray.reports.recorded import visible

    count = export_trajectories(run, format_name, folder, notes)
    _tell(notes)
    terminal.show(visible(f"{count:,} trajectories: {folder}"))


def _has_display() -> bool:
    return sys.platform in ("darwin", "win32") or not {"DISPLAY", "WAYLAND_DISPLAY"}.isdisjoint(os.environ)


def _print(run: RunRecord, show: int | None, notes: list[str]) -> None:
    from trial_ray.reports.printed import list_trajectories, print_trajectory

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
    _tell(notes)


def _tell(notes: list[str]) -> None:
    from trial_ray.reports.recorded import visible

    for note in notes:
        terminal.errors().print(visible(f"note: {note}"), markup=False, highlight=False)
