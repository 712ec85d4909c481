"""Every picture, drawn by matplotlib: the charts of a report, the paper's figures, and maps of sweeps."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from trial_ray.errors import MissingDependencyError, UserInputError
from trial_ray.metrics import CURVES
from trial_ray.reports.charts import class_chart, curve_chart, profile_chart
from trial_ray.reports.records import RunGroup, recorded_iterations

COLOURS = ("#1b6ca8", "#c9550b", "#2f7d4f", "#8a4fa3", "#b0273f", "#6b5b2a", "#0d7d84", "#5d6571")
TEXT, QUIET, GRID = "#16191d", "#545b64", "#e3e6ea"
VARIABLES = {TEXT: "text", QUIET: "quiet", GRID: "grid", **{colour: f"c{n}" for n, colour in enumerate(COLOURS)}}
"""Names of the colours in ``assets/report.css``, which has a second value of each for dark pages."""
DASHES = ("-", "--", ":", "-.")
"""Of neighbouring groups, so that lines differ in grey too."""
STYLE: Any = {
    "font.size": 8,
    "axes.titlesize": 9,
    "figure.titlesize": 10,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "axes.edgecolor": QUIET,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.useoffset": False,
    "grid.color": GRID,
    "legend.frameon": False,
    "errorbar.capsize": 3,
    "svg.fonttype": "none",
    "svg.hashsalt": "trial_ray",
}
FORMATS = ("png", "svg")
FIGURE2 = {"panel", "turn_score", "profile_std"}
MOST_IN_LEGEND = 8
PANELS_IN_A_ROW = 5
LONGEST_ACTION = 34
"""Characters of an action in a figure."""


@contextmanager
def drawing(
    paths: Sequence[Path | io.StringIO], size: tuple[float, float], rows: int = 1, columns: int = 1, **options: Any
) -> Iterator[tuple[Any, Any]]:
    """A figure and its axes; the files are written when the block ends, a text buffer as SVG.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        UserInputError: matplotlib cannot scale an axis to the numbers.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            "Figures need matplotlib, which is not installed; install it with `pip install 'trial-ray[reports]'`."
        ) from error
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        # Of glyphs that the reader's fonts may have, and of numbers that are not finite.
        warnings.simplefilter("ignore")
        figure = Figure(figsize=size, layout="constrained")
        try:
            yield figure, figure.subplots(rows, columns, **options)
            for path in paths:
                if isinstance(path, Path):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    figure.savefig(path, dpi=150)
                else:
                    figure.savefig(path, format="svg", transparent=True)
        except (ArithmeticError, ValueError) as error:
            raise UserInputError(f"Its numbers are too large to be drawn ({error}).") from error


Chart = Mapping[str, Any]


def chart_svg(chart: Chart, styles: dict[str, str]) -> str:
    """A chart as an ``svg`` element for HTML, without inline styles, which the page's policy refuses.

    Args:
        chart: one of :mod:`trial_ray.reports.charts`.
        styles: class names by style; those of the chart are added.
    """
    buffer = io.StringIO()
    with drawing([buffer], _size(chart)) as (_, axis):
        _draw(axis, chart)
    svg = ElementTree.fromstring(buffer.getvalue())
    for parent in list(svg.iter()):
        for child in list(parent):
            if child.tag.endswith(("metadata", "style")):
                parent.remove(child)
    for element in svg.iter():
        element.tag = element.tag.rpartition("}")[2]
        element.attrib = _for_page(element.attrib, styles)
        element.tail = None
        if element.tag != "text":
            element.text = None
    return ElementTree.tostring(svg, encoding="unicode")


def _for_page(attributes: Mapping[str, str], styles: dict[str, str]) -> dict[str, str]:
    """Attributes with classes for styles and groups, and coordinates of two decimals."""
    found = {name.rpartition("}")[2]: value for name, value in attributes.items()}
    identity, style = found.pop("id", ""), found.pop("style", "")
    classes = identity.split() if identity.startswith("group-") else []
    if re.fullmatch("[A-Za-z]*[0-9a-f]{10}|C[0-9a-f]+_.*", identity):  # which others refer to
        found["id"] = identity
    if style:
        style = re.sub("#[0-9a-f]{6}", lambda found: f"var(--{VARIABLES.get(found[0], 'text')})", style)
        classes.append(styles.setdefault(style, f"s{len(styles)}"))
    if classes:
        found["class"] = " ".join(classes)
    return {name: value if name == "id" else re.sub(r"(\.\d\d)\d+", r"\1", value) for name, value in found.items()}


def write_figures(groups: Sequence[RunGroup], folder: Path) -> list[Path]:
    """Write every curve that the runs logged, and the paper's Figures 2 and 3 as far as they can be made.

    Returns:
        The files: ``<chart>.png`` and ``.svg``, ``figure2``, and of every group with turn weights a ``figure3``.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    curves = {spec.name: chart for key, spec in CURVES.items() if (chart := curve_chart(key, groups))}
    figures = {name: [chart] for name, chart in curves.items()}
    if curves.keys() >= FIGURE2:
        figures["figure2"] = [curve for name, curve in curves.items() if name in FIGURE2]
    title = "; ".join(group.title for group in groups)
    written = [path for name, parts in figures.items() for path in _draw_row(parts, title, picture_files(folder, name))]
    weighed = [group for group in groups if class_chart([group])]
    for number, group in enumerate(weighed, start=1):
        name = "figure3" if len(weighed) == 1 else f"figure3_{number}"
        parts = [chart for make in (profile_chart, class_chart) if (chart := make([group]))]
        title = f"{parts[-1]['series'][0]['name']}: {recorded_iterations(group.runs)}"
        written += _draw_row(parts, title, picture_files(folder, name))
    return written


def picture_files(folder: Path, name: str) -> list[Path]:
    """Of a picture, one file a format."""
    return [folder / f"{name}.{suffix}" for suffix in FORMATS]


def _draw_row(charts: Sequence[Chart], title: str, paths: Sequence[Path]) -> list[Path]:
    width, height = (sum(_size(chart)[0] for chart in charts), max(_size(chart)[1] for chart in charts))
    with drawing(paths, (width, height), columns=len(charts), squeeze=False) as (figure, axes):
        for axis, chart in zip(axes.flat, charts, strict=True):
            _draw(axis, chart)
            axis.set_title(_short(chart["title"], 60))
        figure.suptitle(_short(title, 200))
    return list(paths)


def _size(chart: Chart) -> tuple[float, float]:
    """Width and height in inches."""
    rows = len(chart.get("turns", chart.get("rows", ())))
    return 5.2, max(2.4 if "rows" in chart else 3.0, 1.6 + 0.24 * rows)


def _draw(axis: Any, chart: Chart) -> None:
    _DRAWN[chart["kind"]](axis, chart)
    handles, labels = axis.get_legend_handles_labels()
    if chart["kind"] in ("profile", "time"):
        axis.figure.legend(handles, labels, loc="outside lower center", ncols=2)
    elif 1 < len(labels) <= MOST_IN_LEGEND:
        axis.legend()


def _draw_curve(axis: Any, chart: Chart) -> None:
    scale = 100 if chart["percent"] else 1
    for series in chart["series"]:
        group = series["group"]
        colour = {"color": COLOURS[group % len(COLOURS)], "gid": f"group-{group}"}
        if series["low"]:
            low, high = ([scale * value for value in series[name]] for name in ("low", "high"))
            axis.fill_between(series["x"], low, high, alpha=0.2, linewidth=0, **colour)
        for run in series["runs"] if len(series["runs"]) > 1 else ():
            values = [scale * value for value in run["y"]]
            axis.plot(run["x"], values, alpha=0.45, linewidth=0.7, **{**colour, "gid": f"group-{group} single"})
        marker = {"marker": "o", "markersize": 2.5} if len(series["x"]) <= 40 else {}
        style = {"linestyle": DASHES[group % len(DASHES)], "linewidth": 1.4, "label": _short(series["name"])}
        axis.plot(series["x"], [scale * value for value in series["mean"]], **colour, **marker, **style)
    if chart["warm_up"]:
        axis.margins(x=0.02)
        axis.axvspan(axis.get_xlim()[0], min(chart["warm_up"]) - 0.5, color=GRID, zorder=0)
        for start in chart["warm_up"]:
            axis.axvline(start - 0.5, color=QUIET, linewidth=0.8, linestyle="--")
    if chart["percent"]:
        axis.set_ylim(bottom=0)
    axis.set_ylabel(f"{chart['axis']} (%)" if chart["percent"] else chart["axis"])
    axis.set_xlabel("iteration")
    axis.xaxis.get_major_locator().set_params(integer=True)


def _draw_classes(axis: Any, chart: Chart) -> None:
    names = [name for name in chart["classes"] if any(name in series["means"] for series in chart["series"])]
    width = 0.8 / len(chart["series"])
    for number, series in enumerate(chart["series"]):
        shown = [(at, series["means"][name]) for at, name in enumerate(names) if name in series["means"]]
        left = -0.4 + width * (number + 0.5)
        gid = f"group-{series['group']}"
        bars = axis.bar(
            [at + left for at, _ in shown],
            [cell["mean"] for _, cell in shown],
            width,
            yerr=[cell["sem"] or 0.0 for _, cell in shown],
            color=COLOURS[series["group"] % len(COLOURS)],
            ecolor=QUIET,
            label=_short(series["name"]),
            gid=gid,
        )
        for mark in bars.errorbar.get_children():
            mark.set_gid(gid)
    for at, name in enumerate(names):
        counts = [str(series["means"][name]["trajectories"]) for series in chart["series"] if name in series["means"]]
        names[at] = f"{name.replace('/', '/' + chr(10))}\n(n={', '.join(counts)})"
    axis.set_xticks(range(len(names)), names)
    axis.axhline(1.0, color=QUIET, linewidth=0.8, linestyle="--")
    axis.set_ylabel(chart["axis"])


def _draw_profile(axis: Any, chart: Chart) -> None:
    turns = chart["turns"]
    for colour, name in zip(cycle(COLOURS), chart["classes"], strict=False):
        shown = [(at, turn["weight"]) for at, turn in enumerate(turns) if turn["action_class"] == name]
        if shown:
            axis.barh(*zip(*shown, strict=True), color=colour, label=name)
    axis.set_yticks(range(len(turns)), [f"T{number}  {_short(turn['action'])}" for number, turn in enumerate(turns, 1)])
    axis.invert_yaxis()
    axis.axvline(1.0, color=QUIET, linewidth=0.8, linestyle="--")
    axis.set_xlabel(chart["axis"])


def _draw_time(axis: Any, chart: Chart) -> None:
    starts = [0.0] * len(chart["rows"])
    for colour, series in zip(cycle(COLOURS), chart["series"], strict=False):
        axis.barh(range(len(starts)), series["values"], left=starts, color=colour, label=series["name"])
        starts = [start + value for start, value in zip(starts, series["values"], strict=True)]
    axis.set_yticks(range(len(starts)), [_short(name) for name in chart["rows"]])
    axis.invert_yaxis()
    axis.set_xlabel(chart["axis"])


_DRAWN: dict[str, Callable[[Any, Chart], None]] = {
    "curve": _draw_curve,
    "classes": _draw_classes,
    "profile": _draw_profile,
    "time": _draw_time,
}


def _short(text: str, longest: int = LONGEST_ACTION) -> str:
    # A dollar sign would begin mathematics; what a policy says is shown as it is.
    text = "".join(char if char.isprintable() else " " for char in text)
    text = text if len(text) <= longest else text[: longest - 1] + "…"
    return text.replace("$", r"\$")


def plot_dynamics(data: Mapping[str, Any], *paths: Path) -> list[Path]:
    """Figure 2: (a) success on the panel by method, (b) mean turn score, (c) spread of the profile.

    Args:
        data: ``panel`` (by method a list of ``{iteration, mean, runs: [values]}``), ``turn_score`` and ``profile_std`` (by
            method a list of windows), ``hindsight_start_iteration``, ``iterations``, ``title``.
        paths: files to write.
    """
    parts = {
        "panel": ("(a) panel success", "success"),
        "turn_score": ("(b) mean turn score", "nats"),
        "profile_std": ("(c) standard deviation of the profile", "multiplier"),
    }
    groups = list(dict.fromkeys(name for key in parts for name in data[key]))
    charts = [
        {
            "kind": "curve",
            "title": title,
            "axis": axis,
            "percent": key == "panel",
            "warm_up": [data["hindsight_start_iteration"]],
            "series": [_series(groups.index(name), name, points) for name, points in data[key].items()],
        }
        for key, (title, axis) in parts.items()
    ]
    return _draw_row(charts, data["title"], paths)


def _series(group: int, name: str, points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Points of the panel with the value of every run, or means of windows with a standard deviation over runs."""
    x = [point["iteration"] if "iteration" in point else (point["first"] + point["last"]) / 2 for point in points]
    stds = [point.get("std") or 0.0 for point in points]
    runs = zip(*(point["runs"] for point in points if "iteration" in point), strict=True)
    return {
        "group": group,
        "name": name,
        "x": x,
        "mean": [point["mean"] for point in points],
        "low": [point["mean"] - std for point, std in zip(points, stds, strict=True)] if any(stds) else None,
        "high": [point["mean"] + std for point, std in zip(points, stds, strict=True)],
        "runs": [{"x": x, "y": values} for values in runs],
    }


def plot_allocation(data: Mapping[str, Any], *paths: Path) -> list[Path]:
    """Figure 3: (a) the weights of one trajectory, turn by turn, (b) mean weight of every class of decision.

    Args:
        data: ``example`` (a trace), ``classes`` (by class ``mean``, ``sem``, ``trajectories``), ``title``.
        paths: files to write.
    """
    order, classes = data["class_order"], data["classes"]
    charts = [
        {
            "kind": "profile",
            "title": "(a) turn weights of one trajectory",
            "axis": "multiplier",
            "classes": order,
            "turns": data["example"]["turns"],
        },
        {
            "kind": "classes",
            "title": "(b) mean weight ± standard error by class of decision",
            "axis": "multiplier",
            "classes": order,
            "series": [{"group": 0, "name": "", "means": classes}],
        },
    ]
    return _draw_row(charts, data["title"], paths)


def plot_learning(data: Mapping[str, Any], *paths: Path) -> list[Path]:
    """Learning curves: success of the training rollouts on new games, every seed a thin line, and the mean of each method.

    Args:
        data: of ``trial_ray.reports.dynamics.learning``, with the methods' titles as names, and ``title``.
        paths: files to write.
    """
    methods = data["methods"]
    rows, columns = math.ceil(len(methods) / PANELS_IN_A_ROW), min(len(methods), PANELS_IN_A_ROW)
    size = (1.2 + 2.3 * columns, 0.5 + 2.7 * rows)
    with drawing(paths, size, rows, columns, sharex=True, sharey=True, squeeze=False) as (figure, axes):
        reference, *_ = methods
        for axis, name, colour in zip(axes.flat, methods, cycle(COLOURS), strict=False):
            for values in methods[name]["curves"].values():
                _plot_smooth(axis, values, color=colour, alpha=0.35, linewidth=0.7)
            if name != reference:
                _plot_smooth(axis, methods[reference]["curve"], color=TEXT, linestyle=":", label=f"{reference}, mean")
            _plot_smooth(axis, methods[name]["curve"], color=colour, linewidth=2.0, label=f"{name}, mean")
            axis.set_title(f"{name} ({len(methods[name]['curves'])} seeds)")
            axis.legend(loc="lower right")
        for axis in axes.flat[len(methods) :]:
            axis.set_axis_off()
        figure.supxlabel("iteration")
        figure.supylabel("success on new games (%)")
        figure.suptitle(data["title"])
    return list(paths)


def _plot_smooth(axis: Any, values: Sequence[float], span: int = 5, **style: Any) -> None:
    """A moving mean in percent, each over the last ``span`` values or as many as there are."""
    means = [100 * sum(values[max(0, end - span) : end]) / min(span, end) for end in range(1, len(values) + 1)]
    axis.plot(range(1, len(means) + 1), means, **style)


def plot_judgement(data: Mapping[str, Any], *paths: Path) -> list[Path]:
    """What the hindsight view says of turns: (a) the gap of planned and of wasted ones, (b) the weight by class of decision.

    Args:
        data: of ``trial_ray.warmstart.judgement.Judgement.figures``, and ``of_turns``, one mapping a turn.
        paths: files to write.
    """
    with drawing(paths, (11, 3.6), columns=2) as (_, (left, right)):
        for planned, name, colour in ((True, "planned", COLOURS[0]), (False, "wasted", COLOURS[1])):
            gaps = [turn["gap"] for turn in data["of_turns"] if turn["planned"] is planned]
            label = f"{name} ({len(gaps)})"
            left.hist(gaps, bins=50, range=(-2, 2), density=bool(gaps), histtype="step", color=colour, label=label)
        area = data["auc_wasted"]
        shown = "" if area is None else f"; area under the curve {area[0]:.2f} [{area[1]:.2f}, {area[2]:.2f}]"
        left.set_title(f"(a) density of the signed gap of turns{shown}")
        left.set_xlabel("mean gap of a turn's tokens (nats)")
        left.legend()
        classes = data["classes"]
        errors = [of["weight_error"] or 0.0 for of in classes.values()]
        right.bar(range(len(classes)), [of["weight"] for of in classes.values()], yerr=errors, color=COLOURS[2])
        right.set_xticks(range(len(classes)), [f"{name}\n(n={of['turns']})" for name, of in classes.items()])
        right.axhline(1.0, color=TEXT, linewidth=0.8, linestyle="--")
        right.set_title("(b) mean weight by class of decision, standard error over games")
    return list(paths)
