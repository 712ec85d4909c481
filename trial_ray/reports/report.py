"""The report of one or several runs as one HTML page."""

from __future__ import annotations

import base64
import gzip
import hashlib
import importlib.util
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from trial_ray.files import finite
from trial_ray.reports.charts import all_charts, describe_chart
from trial_ray.reports.dynamics import WINDOW
from trial_ray.reports.findings import (
    Difference,
    family_rows,
    last_training_success,
    paired_differences,
    summary_sentences,
)
from trial_ray.reports.records import RunGroup, RunRecord, differing_settings, run_label, setting_text, value_text
from trial_ray.version import __version__

ASSETS = resources.files("trial_ray.reports") / "assets"
LIBRARY = "package_data/plotly.min.js"
"""Inside the Python package ``plotly``, of which nothing else is used."""
# Plotly.js adds its style rules one by one to an empty style sheet, which the hash of no text allows.
NO_TEXT = ""


def render_page(content: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    """The whole page.

    Args:
        content: what ``assets/report.html.jinja`` shows; all of it is escaped.
        data: what ``assets/report.js`` draws; JSON values.
    """
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    style, script, library = _asset("report.css"), _asset("report.js"), plotly_source()
    scripts = [script, library] if library else []
    template = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).from_string(_asset("report.html.jinja"))
    return template.render(
        **content,
        policy=content_security_policy(scripts, [style, NO_TEXT]),
        style=Markup(style),
        script=Markup(script),
        data=Markup(json_for_html(data)),
        library=Markup(_compressed(library)) if library else "",
    )


def content_security_policy(scripts: Sequence[str], styles: Sequence[str]) -> str:
    """Nothing is loaded or sent, and no script or style sheet counts but these. Charts are saved as images of the page's own."""
    script_hashes = " ".join(_hash(text) for text in scripts) or "'none'"
    style_hashes = " ".join(_hash(text) for text in styles)
    return (
        f"default-src 'none'; script-src {script_hashes}; style-src {style_hashes}; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def json_for_html(value: Any) -> str:
    """JSON that no text inside it can end: the characters that HTML knows are written as escapes; null for NaN and infinity."""
    text = json.dumps(finite(value), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


def plotly_source() -> str:
    """The library's code, out of the Python package; empty where that is not installed."""
    # Found without importing the package, which would bring in much that is not needed.
    spec = importlib.util.find_spec("plotly")
    path = Path(spec.origin).parent / LIBRARY if spec and spec.origin else None
    return path.read_text(encoding="utf-8") if path and path.is_file() else ""


@cache
def _compressed(source: str) -> str:
    """Text that the page unpacks, a third of the library's size; the same bytes every time."""
    return base64.b64encode(gzip.compress(source.encode(), compresslevel=9, mtime=0)).decode()


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


DASH = "–"
MOST_ROWS = 120
"""Rows of a chart's table; of a longer curve every k-th iteration is shown."""
BANDS = (
    "Lines are means over seeds, bands 95 % bootstrap intervals over them (too narrow with few seeds). Shaded: the warm-up, in "
    "which the dense term does not act."
)


@dataclass(frozen=True, slots=True)
class Table:
    """A table of texts; ``folded`` ones are opened by the reader, those with ``long`` texts wrap them."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    folded: bool = False
    long: bool = False


@dataclass(slots=True)
class Section:
    """A part of the page; ``text`` explains it, ``notes`` say what it lacks."""

    name: str
    title: str
    text: str = ""
    notes: list[str] = field(default_factory=list)
    charts: Sequence[Mapping[str, Any]] = ()
    tables: list[Table] = field(default_factory=list)


def report_page(groups: Sequence[RunGroup], title: str) -> str:
    """The page of some groups of runs, as HTML."""
    charts = all_charts(groups)
    differences, missing_differences = paired_differences(groups)
    sections = _sections(groups, charts)
    if len(groups) > 1:
        sections.insert(2, _differences_section(differences, missing_differences))
    runs = [run for group in groups for run in group.runs]
    content = {
        "title": title,
        "subtitle": _subtitle(runs),
        "version": __version__,
        "sentences": summary_sentences(groups, differences),
        "missing": list(_missing(runs)),
        "runs": _runs_table(groups),
        "choices": [group.title for group in groups] if len(groups) > 1 or len(runs) > 1 else [],
        "single_runs": len(runs) > len(groups),
        "sections": sections,
    }
    data = {
        "iterations": max((run.iterations for run in runs), default=1),
        "charts": [chart for found in charts.values() for chart in found],
    }
    return render_page(content, data)


def _subtitle(runs: Sequence[RunRecord]) -> str:
    environments = dict.fromkeys(known.title for run in runs for known in run.environments)
    backbones = dict.fromkeys(run.backbone for run in runs if run.backbone)
    parts = [", ".join(environments), ", ".join(backbones), f"{len(runs)} run{'s' if len(runs) > 1 else ''}"]
    return " · ".join(part for part in parts if part)


def _missing(runs: Sequence[RunRecord]) -> Iterator[str]:
    for run in runs:
        for reason in run.missing:
            yield reason if len(runs) == 1 else f"{run.name}: {reason}"


def _sections(groups: Sequence[RunGroup], charts: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Section]:
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
        Section(
            "allocation",
            "Allocation over turns",
            "The paper's Figure 3." if weighed else "",
        ),
        Section("policy", "Policy"),
        Section("engine", "Engine and learner", "How far the policy that sampled is from the one that is updated."),
        Section("time", "Time and cost"),
    ]
    for section in sections[1:]:
        section.charts = [_with_words(chart) for chart in charts[section.name]]
        if not section.charts:
            section.notes.append(_why_empty(section, weighed))
    sections[-1].tables = [_cost_table(run, group) for group in groups for run in group.runs if run.cost]
    sections[1].tables = _family_tables(groups)
    sections.append(_configuration(groups))
    return sections


def _why_empty(section: Section, weighed: bool) -> str:
    if section.name in ("hindsight", "allocation") and not weighed:
        return "No run has a method with turn scores."
    reasons = {
        "allocation": "No turn weights of trajectories were found, see “What is missing”.",
        "time": "No cost.json was found.",
    }
    return reasons.get(section.name, "The runs logged none of these metrics.")


def _with_words(chart: Mapping[str, Any]) -> dict[str, Any]:
    return {**chart, "description": describe_chart(chart), "table": _TABLES[chart["kind"]](chart)}


def _number(value: float | None, percent: bool = False) -> str:
    if value is None:
        return DASH
    return f"{value:.1%}" if percent else f"{value:.4g}"


def _curve_table(chart: Mapping[str, Any]) -> Table:
    columns = []
    for series in chart["series"]:
        lows, highs = series["low"] or [None] * len(series["x"]), series["high"] or [None] * len(series["x"])
        found = {}
        for x, mean, low, high in zip(series["x"], series["mean"], lows, highs, strict=True):
            text = _number(mean, chart["percent"])
            interval = f" [{_number(low, chart['percent'])}, {_number(high, chart['percent'])}]"
            found[x] = text if low is None else text + interval
        columns.append(found)
    iterations = sorted({x for column in columns for x in column})
    step = math.ceil(len(iterations) / MOST_ROWS) or 1
    shown = sorted({*iterations[::step], *iterations[-1:]})
    head = ["iteration", *(series["name"] for series in chart["series"])]
    rows = [[f"{x:g}", *(column.get(x, DASH) for column in columns)] for x in shown]
    caption = f"{chart['title']} ({chart['axis']})"
    return Table(caption if step == 1 else f"{caption}, every {step}th iteration", head, rows)


def _class_table(chart: Mapping[str, Any]) -> Table:
    rows = []
    for index, name in enumerate(chart["classes"]):
        cells = []
        for series in chart["series"]:
            mean, sem, count = (series[key][index] for key in ("mean", "sem", "trajectories"))
            cells.append(DASH if mean is None else f"{mean:.3f} ± {_number(sem)} ({count} trajectories)")
        rows.append([name, *cells])
    return Table(f"{chart['title']}: mean ± SEM", ["class", *(series["name"] for series in chart["series"])], rows)


def _profile_table(chart: Mapping[str, Any]) -> Table:
    rows = [
        [
            f"T{number}",
            turn["action"],
            turn["class"],
            f"{turn['weight']:.3f}",
            f"{turn['score']:.3f}",
            str(turn["tokens"]),
        ]
        for number, turn in enumerate(chart["turns"], start=1)
    ]
    return Table(chart["title"], ["turn", "action", "class", "multiplier", "score (nats)", "tokens"], rows)


def _time_table(chart: Mapping[str, Any]) -> Table:
    rows = [
        [name, *(f"{series['values'][index]:.1f}" for series in chart["series"])]
        for index, name in enumerate(chart["rows"])
    ]
    return Table(f"{chart['title']} (seconds)", ["run", *(series["name"] for series in chart["series"])], rows)


_TABLES = {"curve": _curve_table, "classes": _class_table, "profile": _profile_table, "time": _time_table}


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
                    ", ".join(known.title for known in run.environments) or DASH,
                    run.state or DASH,
                    str(run.iterations),
                    DASH if success is None else f"{success.mean:.1%}",
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
        "panel before",
        "panel after",
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
    rows = [
        [
            row.family,
            row.group,
            row.where,
            f"{row.rate:.1%} [{row.interval[0]:.1%}, {row.interval[1]:.1%}]",
            f"{row.successes} of {row.episodes}",
        ]
        for row in family_rows(groups)
    ]
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
    rows = [[row.label, row.figure, row.share] for part in run.cost for row in part]
    return Table(
        f"Cost of {group.name}, {run_label(run, group)}", ["measure", "figure", "share"], rows, len(group.runs) > 1
    )


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
