"""``trial-ray report RUN...``: one HTML page of what runs learned, did and cost."""

from __future__ import annotations

import argparse
from pathlib import Path

from trial_ray.cli import console as terminal

HELP = "one HTML page of what runs learned and cost"
EPILOG = """examples:
  trial-ray report runs/my-run                              writes runs/my-run/report.html
  trial-ray report runs/trial-0 runs/trial-1 runs/grpo-0 runs/grpo-1 --output comparison.html
  trial-ray report runs/my-sweep                            one curve a trial
  trial-ray report runs/my-run --figures figures            the charts as PNG and SVG as well

RUN is the folder of a run or of a sweep. Runs that differ by seed alone are shown as one curve with an interval; others are
compared, paired by seed and task. The page loads nothing: it can be sent, and opened without a network.
`train` and `sweep` leave such a page in their folders.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folder of a run or of a sweep")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="the page (default: report.html in the folder, here with several)",
    )
    parser.add_argument("--figures", type=Path, metavar="DIR", help="also write every chart as PNG and SVG into DIR")


def run(args: argparse.Namespace) -> int:
    """Write the page; see the module's docstring."""
    from trial_ray.runs.report import FILE, load_groups, write_report

    groups = load_groups(args.runs)
    runs = [run for group in groups for run in group.runs]
    title = args.runs[0].resolve().name if len(args.runs) == 1 else f"{len(runs)} runs"
    output = args.output or (args.runs[0] / FILE if len(args.runs) == 1 else Path(FILE))
    for run in runs:
        for reason in run.missing:
            terminal.show(f"missing: {run.name}: {reason}")
    written = [write_report(groups, title, output)]
    if args.figures:
        from trial_ray.reports.plots import write_figures

        written = [*write_figures(groups, args.figures), *written]
    for path in written:
        terminal.show(f"written: {path} ({path.stat().st_size:,} bytes)")
    return terminal.DONE
