"""The report of one or several runs as one HTML page."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from trial_ray.errors import MissingDependencyError, UserInputError
from trial_ray.reports.charts import DASH, WINDOW, Table, all_charts
from trial_ray.reports.findings import (
    Difference,
    family_rows,
    last_training_success,
    paired_differences,
    summary_sentences,
)
from trial_ray.reports.plots import chart_svg
from trial_ray.reports.records import RunGroup, RunRecord, differing_settings, run_label, setting_text, value_text
from trial_ray.version import __version__

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

    differences, missing_differences = paired_differences(groups)
    runs = [run for group in groups for run in group.runs]
    missing = [reason if len(runs) == 1 else f"{run.name}: {reason}" for run in runs for reason in run.missing]
    sections = _sections(groups)
    if len(groups) > 1:
        sections.insert(2, _differences_section(differences, missing_differences))
    styles: dict[str, str] = {}
    for chart in (chart for section in sections for chart in section.charts):
        try:
            chart["svg"] = Markup(chart_svg(chart, styles))
        except MissingDependencyError:
            missing.append(NO_PICTURES)
            break
        except UserInputError as error:
            missing.append(f"The chart “{chart['title']}”: {error}")
    style = _style(styles, len(groups))
    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return page.from_string(_asset("report.html.jinja")).render(
        policy=f"default-src 'none'; style-src {_hash(style)}; base-uri 'none'; form-action 'none'",
        style=Markup(style),
        title=title,
        subtitle=_subtitle(runs),
        version=__version__,
        sentences=summary_sentences(groups, differences),
        missing=missing,
        runs=_runs_table(groups),
        choices=[group.title for group in groups] if styles and len(runs) > 1 else [],
        single_runs=len(runs) > len(groups),
        sections=sections,
    )


def _style(styles: Mapping[str, str], groups: int) -> str:
    """The page's style sheet, with the styles of its charts and a rule for every choice of what they show."""
    drawn = "".join(f".{name} {{{style}}}\n" for style, name in styles.items())
    hidden = [f"group-{number}" for number in range(groups)] + ["single"]
    choices = "".join(f"body:has(#show-{name}:not(:checked)) .{name} {{display: none}}\n" for name in hidden)
    return _asset("report.css") + drawn + choices


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _subtitle(runs: Sequence[RunRecord]) -> str:
    environments = dict.fromkeys(adapter.name for run in runs for adapter in run.environments.values())
    backbones = dict.fromkeys(run.backbone for run in runs if run.backbone)
    parts = [", ".join(environments), ", ".join(backbones), f"{len(runs)} run{'s' if len(runs) > 1 else ''}"]
    return " · ".join(part for part in parts if part)


def _sections(groups: Sequence[RunGroup]) -> list[Section]:
    charts = all_charts(groups)
    several = any(len(group.runs) > 1 for group in groups)
    weighed = any(group.hindsight_start is not None for group in groups)
    sections = [
        Section("summary", "Summary"),
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
    sections[1].tables = _family_tables(groups)
    for section in sections[1:]:
        section.charts = [{"link": "", **chart, "svg": ""} for chart in charts.get(section.name, ())]
        if not section.charts and not section.tables:
            section.notes.append("Nothing of this was recorded.")
    sections.append(_configuration(groups))
    return sections


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
                    ", ".join(adapter.name for adapter in run.environments.values()) or DASH,
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


def _panel_after(run: RunRecord, name: str) -> str:
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


def _differences_section(found: Sequence[Difference], missing: Sequence[str]) -> Section:
    rows = [
        [
            f"{one.second} − {one.first}",
            one.where,
            f"{100 * one.difference:+.1f} [{100 * one.interval[0]:+.1f}, {100 * one.interval[1]:+.1f}]",
            f"{one.p_value:.2g}",
            f"{one.seeds} × {one.tasks}",
            one.test,
        ]
        for one in found
    ]
    section = Section(
        "differences",
        "Paired differences",
        "Success after training on the same tasks, runs of the same seed paired; percentage points with 95 % intervals. p-values "
        "are two-sided, of several seeds those of the stricter of two tests, and not corrected for the number of comparisons."
        if rows
        else "",
        list(missing),
    )
    if rows:
        head = ["difference", "played", "points", "p", "seeds × tasks", "test"]
        section.tables = [Table("Differences of success after training", head, rows)]
    elif not missing:
        section.notes.append("No held-out tasks were played after training by runs of different groups.")
    return section


def _cost_table(run: RunRecord, group: RunGroup) -> Table:
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
        settings = {**run.settings, **run.parameters}
        rows = [[key, setting_text(run, key)] for key in sorted(settings)]
        if rows:
            section.tables.append(Table(f"Every setting of {group.title}", ["setting", "value"], rows, True, True))
    changed = [
        [run.name, str(each.iteration), each.name, value_text(each.before), value_text(each.after)]
        for run in runs
        for each in run.changes
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
