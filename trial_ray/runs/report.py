"""``report.html`` of runs, as ``trial-ray report`` writes it and as training and sweeps leave it in their folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trial_ray.errors import first_line
from trial_ray.files import write_text
from trial_ray.runs.terminal import say

if TYPE_CHECKING:
    from rich.console import Console

    from trial_ray.reports.records import RunGroup

FILE = "report.html"


def load_groups(folders: Sequence[Path]) -> list[RunGroup]:
    """The runs of some folders, those that differ by seed alone together.

    Raises:
        UserInputError: one is not the folder of a run or of a sweep, or there is nothing to show in any.
    """
    from trial_ray.reports.findings import require_something
    from trial_ray.reports.records import group_runs
    from trial_ray.runs.reader import read_runs

    unique = dict.fromkeys(folder.expanduser().resolve() for folder in folders)
    groups = group_runs([run for folder in unique for run in read_runs(folder)])
    require_something(groups)
    return groups


def write_report(groups: Sequence[RunGroup], title: str, output: Path) -> Path:
    """Write the page; it appears whole or not at all."""
    from trial_ray.reports.report import report_page

    return write_text(output, report_page(groups, title))


def leave_report(folder: Path, console: Console) -> None:
    """Write the report of a run or sweep that has ended into its folder, and print where it is.

    What it cost to get here must not be lost to a report: a failure is said in a line.
    """
    try:
        path = write_report(load_groups([folder]), folder.name, folder / FILE)
    except Exception as error:
        say(console, f"no report was written: {first_line(error)}")
        return
    say(console, f"report: {path}")
