"""Report page: one or several runs as one HTML page."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from trial_envs.core.extras import install_command
from trial_ray.errors import MissingDependencyError, UserInputError, first_line
from trial_ray.files import write_text
from trial_ray.reports.charts import all_charts
from trial_ray.reports.groups import (
    RunGroup,
    differing_settings,
    group_runs,
    recorded_iterations,
    run_label,
    value_text,
)
from trial_ray.reports.plots import chart_svg
from trial_ray.reports.tables import (
    difference_rows,
    family_rows,
    last_training_success,
    require_something,
    success_rows,
)
from trial_ray.reports.templates import ASSETS, render
from trial_ray.runs.reader import read_runs
from trial_ray.runs.terminal import say
from trial_ray.version import __version__

if TYPE_CHECKING:
    from rich.console import Console


def report_page(groups: Sequence[RunGroup], title: str) -> str:
    """Return the page of some groups of runs as HTML. Recorded text is escaped, and no script runs on the page.

    Args:
        groups: groups to show.
        title: title of the page.
    """
    from markupsafe import Markup

    runs = [run for group in groups for run in group.runs]
    missing = [reason if len(runs) == 1 else f"{run.name}: {reason}" for run in runs for reason in run.reasons()]
    charts = all_charts(groups)
    for chart in chain(*charts.values()):
        try:
            chart["image"] = base64.b64encode(chart_svg(chart).encode()).decode()
        except MissingDependencyError:
            command = install_command("reports")
            missing.append(f"Charts need matplotlib (`{command}`); the numbers of each chart are in its table.")
            break
        except UserInputError as error:
            missing.append(f"The chart “{chart['title']}”: {error}")
    style = (ASSETS / "report.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return render(
        "report.html.jinja",
        policy=f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'",
        style=Markup(style),
        title=title,
        version=__version__,
        missing=missing,
        groups=groups,
        runs=runs,
        charts=charts,
        success=success_rows(groups),
        families=family_rows(groups),
        differences=difference_rows(groups),
        last_training_success=last_training_success,
        recorded_iterations=recorded_iterations,
        run_label=run_label,
        differing_settings=differing_settings,
        value_text=value_text,
    )


REPORT_FILE = "report.html"


def load_groups(folders: Sequence[Path]) -> list[RunGroup]:
    """Read the runs of some folders, and group runs that differ only in their seed.

    Raises:
        UserInputError: a folder is not the folder of a run or of a sweep, or there is nothing to show in any of them.
    """
    unique = dict.fromkeys(folder.expanduser().resolve() for folder in folders)
    groups = group_runs([run for folder in unique for run in read_runs(folder)])
    require_something(groups)
    return groups


def write_report(groups: Sequence[RunGroup], title: str, output: Path) -> Path:
    """Write the page atomically."""
    return write_text(output, report_page(groups, title))


def leave_report(folder: Path, console: Console) -> None:
    """Write the report of a finished run or sweep into its folder, and print its path.

    An error is printed as one line and not raised: a failed report must not end the command of a run that succeeded.
    """
    try:
        path = write_report(load_groups([folder]), folder.name, folder / REPORT_FILE)
    except Exception as error:
        say(console, f"no report was written: {first_line(error)}")
        return
    say(console, f"report: {path}")
