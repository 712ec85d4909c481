"""The report of one or several runs as one HTML page."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trial_ray.errors import MissingDependencyError, UserInputError, first_line
from trial_ray.files import write_text
from trial_ray.reports.charts import DASH, WINDOW, Table, all_charts
from trial_ray.reports.findings import (
    difference_rows,
    family_rows,
    last_training_success,
    require_something,
    success_rows,
)
from trial_ray.reports.groups import RunGroup, differing_settings, group_runs, run_label, setting_text, value_text
from trial_ray.reports.plots import chart_svg
from trial_ray.reports.run import RecordedRun, read_runs
from trial_ray.runs.terminal import say
from trial_ray.version import __version__

if TYPE_CHECKING:
    from rich.console import Console

ASSETS = resources.files("trial_ray.reports") / "assets"
NO_PICTURES = "Charts need matplotlib (`pip install 'trial-ray[reports]'`); each one's numbers are in its table."
BANDS = (
    "Lines are means over seeds, bands 95 % bootstrap intervals over them (too narrow with few seeds). Shaded: the warm-up, in "
    "which the dense term does not act."
)


@dataclass(slots=True)
class Section:
    """A part of the page; ``text`` explains it, ``notes`` say what it lacks."""

    name: str
    title: str
    text: str = ""
    notes: list[str] = field(default_factory=list)
    charts: Sequence[dict[str, Any]] = ()
    tables: list[Table] = field(default_factory=list)


def report_page(groups: Sequence[RunGroup], title: str) -> str:
    """The page of some groups of runs, as HTML; all that a run recorded is escaped, and no script runs on it.

    Args:
        groups: what it shows.
        title: of the page.
    """
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    runs = [run for group in groups for run in group.runs]
    missing = [reason if len(runs) == 1 else f"{run.name}: {reason}" for run in runs for reason in run.reasons()]
    sections = _sections(groups)
    if len(groups) > 1:
        sections.insert(2, _differences_section(groups))
    for chart in (chart for section in sections for chart in section.charts):
        try:
            chart["image"] = base64.b64encode(chart_svg(chart).encode()).decode()
        except MissingDependencyError:
            missing.append(NO_PICTURES)
            break
        except UserInputError as error:
            missing.append(f"The chart “{chart['title']}”: {error}")
    style = _asset("report.css")
    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return page.from_string(_asset("report.html.jinja")).render(
        policy=f"default-src 'none'; img-src data:; style-src {_hash(style)}; base-uri 'none'; form-action 'none'",
        style=Markup(style),
        title=title,
        subtitle=_subtitle(runs),
        version=__version__,
        missing=missing,
        sections=sections,
    )


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _subtitle(runs: Sequence[RecordedRun]) -> str:
    environments = dict.fromkeys(adapter.name for run in runs for adapter in run.config.environments.values())
    backbones = dict.fromkeys(run.config.backbone for run in runs if run.config.backbone)
    parts = [", ".join(environments), ", ".join(backbones), f"{len(runs)} run{'s' if len(runs) > 1 else ''}"]
    return " · ".join(part for part in parts if part)


def _sections(groups: Sequence[RunGroup]) -> list[Section]:
    charts = all_charts(groups)
    several = any(len(group.runs) > 1 for group in groups)
    weighed = any(group.hindsight_start is not None for group in groups)
    sections = [
        Section("summary", "Summary", "Brackets are 95 % intervals, points are percentage points."),
        Section("learning", "Learning curves", BANDS if several else ""),
        Section(
            "hindsight",
            "Turn scores and profile",
            "The paper's Figure 2 (b, c), and how the clamp acts." if weighed else "",
        ),
        Section("allocation", "Allocation over turns", "The paper's Figure 3." if weighed else ""),
        Section("policy", "Policy"),
        Section("engine", "Engine and learner", "How far the policy that sampled is from the one that is updated."),
        Section("time", "Time and cost"),
    ]
    sections[-1].tables = [_cost_table(run, group) for group in groups for run in group.runs if run.cost]
    sections[0].tables = [*_success_tables(groups), _runs_table(groups)]
    sections[1].tables = _family_tables(groups)
    for section in sections[1:]:
        section.charts = [{**chart, "image": ""} for chart in charts.get(section.name, ())]
        if not section.charts and not section.tables:
            section.notes.append("Nothing of this was recorded.")
    sections.append(_configuration(groups))
    return sections


def _success_tables(groups: Sequence[RunGroup]) -> list[Table]:
    head = ["runs", "played", "iterations", "success after training", "before training", "paired change, points"]
    rows = success_rows(groups)
    return [Table("Held-out tasks", head, rows, long=True)] if rows else []


def _runs_table(groups: Sequence[RunGroup]) -> Table:
    rows = []
    for group in groups:
        for run in group.runs:
            success = last_training_success(run)
            rows.append(
                [
                    run.name,
                    group.name,
                    DASH if run.seed is None else str(run.seed),
                    ", ".join(adapter.name for adapter in run.config.environments.values()) or DASH,
                    run.state or DASH,
                    str(run.iterations),
                    DASH if success is None else f"{success:.1%}",
                    ", ".join(_named(name, str(result.overall)) for name, result in run.before.items()) or DASH,
                    ", ".join(_panel_after(run, name) for name in run.after) or DASH,
                ]
            )
    head = [
        "run",
        "group",
        "seed",
        "environment",
        "state",
        "iterations",
        f"training, last {WINDOW}",
        "evaluation before",
        "evaluation after",
    ]
    return Table("Runs; success with 95 % Wilson intervals", head, rows)


def _panel_after(run: RecordedRun, name: str) -> str:
    iteration = run.evaluated_after(name)
    rate = str(run.after[name].overall)
    return _named(name, rate if iteration == run.iterations else f"{rate}, iteration {iteration}")


def _named(name: str, text: str) -> str:
    """Text with its environment before it, where the run plays in several."""
    return f"{name}: {text}" if name else text


def _family_tables(groups: Sequence[RunGroup]) -> list[Table]:
    rows = family_rows(groups)
    caption = "Success after training by family; 95 % Wilson intervals over all episodes"
    return [Table(caption, ["family", "runs", "played", "success", "episodes"], rows)] if rows else []


def _differences_section(groups: Sequence[RunGroup]) -> Section:
    rows, missing = difference_rows(groups)
    section = Section(
        "differences",
        "Paired differences",
        "Success after training on the same tasks, runs of the same seed paired; percentage points with 95 % intervals. p-values "
        "are two-sided, of several seeds those of the stricter of two tests, and not corrected for the number of comparisons."
        if rows
        else "",
        missing,
    )
    if rows:
        head = ["difference", "played", "points", "p", "seeds × tasks", "test"]
        section.tables = [Table("Differences of success after training", head, rows)]
    elif not missing:
        section.notes.append("No held-out tasks were played after training by runs of different groups.")
    return section


def _cost_table(run: RecordedRun, group: RunGroup) -> Table:
    caption = f"Cost of {group.name}, {run_label(run, group)}"
    return Table(caption, ["measure", "figure", "share"], run.cost, folded=len(group.runs) > 1)


def _configuration(groups: Sequence[RunGroup]) -> Section:
    firsts = [group.runs[0] for group in groups]
    runs = [run for group in groups for run in group.runs]
    section = Section("configuration", "Configuration and versions")
    if len(groups) > 1:
        head = ["setting", *(group.name for group in groups)]
        rows = [[key, *(setting_text(run, key) for run in firsts)] for key in differing_settings(firsts)]
        section.tables.append(Table("Settings in which the groups differ", head, rows, long=True))
    for group, run in zip(groups, firsts, strict=True):
        settings = {**run.config.settings, **run.parameters}
        rows = [[key, setting_text(run, key)] for key in sorted(settings)]
        if rows:
            section.tables.append(Table(f"Every setting of {group.title}", ["setting", "value"], rows, True, True))
    changed = [
        [run.name, str(each.iteration), each.name, value_text(each.before), value_text(each.after)]
        for run in runs
        for each in run.config.changes
    ]
    if changed:
        head = ["run", "from iteration", "setting", "before", "from then on"]
        section.tables.append(Table("Settings that changed when a run was resumed", head, changed, long=True))
    names = dict.fromkeys(name for run in runs for name in run.versions)
    if names:
        rows = [[name, ", ".join(dict.fromkeys(run.versions.get(name, DASH) for run in runs))] for name in names]
        section.tables.append(Table("Versions and machine", ["what", "version"], rows, long=True))
    if not section.tables:
        section.notes.append("No configuration was recorded.")
    return section


REPORT_FILE = "report.html"


def load_groups(folders: Sequence[Path]) -> list[RunGroup]:
    """The runs of some folders, those that differ by seed alone together.

    Raises:
        UserInputError: one is not the folder of a run or of a sweep, or there is nothing to show in any.
    """
    unique = dict.fromkeys(folder.expanduser().resolve() for folder in folders)
    groups = group_runs([run for folder in unique for run in read_runs(folder)])
    require_something(groups)
    return groups


def write_report(groups: Sequence[RunGroup], title: str, output: Path) -> Path:
    """Write the page; it appears whole or not at all."""
    return write_text(output, report_page(groups, title))


def leave_report(folder: Path, console: Console) -> None:
    """Write the report of a run or sweep that has ended into its folder, and print where it is.

    What it cost to get here must not be lost to a report: a failure is said in a line.
    """
    try:
        path = write_report(load_groups([folder]), folder.name, folder / REPORT_FILE)
    except Exception as error:
        say(console, f"no report was written: {first_line(error)}")
        return
    say(console, f"report: {path}")
