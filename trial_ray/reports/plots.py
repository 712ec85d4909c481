"""Every picture, drawn by matplotlib: the charts of a report, the paper's figures, and maps of sweeps."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any

from trial_ray.errors import MissingDependencyError, UserInputError
from trial_ray.files import writing
from trial_ray.metrics import PANEL_SUCCESS, PROFILE_STD, TURN_SCORE
from trial_ray.reports.charts import class_chart, curve_chart, profile_chart
from trial_ray.reports.curves import CURVES
from trial_ray.reports.groups import RunGroup, recorded_iterations

DASHES = ("-", "--", ":", "-.")
"""Of neighbouring groups, so that lines differ in grey too."""
STYLE: Any = {
    "font.size": 8,
    "axes.titlesize": 9,
    "figure.titlesize": 10,
    "axes.formatter.useoffset": False,
    "errorbar.capsize": 3,
    "svg.fonttype": "none",
    "svg.hashsalt": "trial_ray",
}
FORMATS = ("png", "svg")
FIGURE2 = (PANEL_SUCCESS, TURN_SCORE, PROFILE_STD)
MOST_IN_LEGEND = 8
PANELS_IN_A_ROW = 3
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
                    with writing(path):
                        path.parent.mkdir(parents=True, exist_ok=True)
                        figure.savefig(path, dpi=150)
                else:
                    figure.savefig(path, format="svg", metadata={"Date": None})
        except UserInputError:
            raise
        except (ArithmeticError, ValueError) as error:
            raise UserInputError(f"Its numbers are too large to be drawn ({error}).") from error


Chart = Mapping[str, Any]


def chart_svg(chart: Chart) -> str:
    """A chart of :mod:`trial_ray.reports.charts` as an SVG document; errors as :func:`drawing`."""
    buffer = io.StringIO()
    with drawing([buffer], _size(chart)) as (_, axis):
        _draw(axis, chart)
    return buffer.getvalue()


def write_figures(groups: Sequence[RunGroup], folder: Path) -> list[Path]:
    """Write every curve that the runs logged, and the paper's Figures 2 and 3 as far as they can be made.

    Returns:
        The files: ``<chart>.png`` and ``.svg``, ``figure2``, and of every group with turn weights a ``figure3``.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    title = "; ".join(group.title for group in groups)
    figures: dict[str, list[Chart]] = {
        spec.name: [chart] for key, spec in CURVES.items() if (chart := curve_chart(key, groups))
    }
    if len(parts := figure2(groups)) == len(FIGURE2):
        figures["figure2"] = parts
    written = [path for name, charts in figures.items() for path in write_figure(folder, name, charts, title)]
    weighed = [(group, charts) for group in groups if (charts := figure3(group))]
    for number, (group, charts) in enumerate(weighed, start=1):
        name = "figure3" if len(weighed) == 1 else f"figure3_{number}"
        recorded = [run for run in group.runs if run.allocation]
        title = f"{group.title_of(recorded)}: {recorded_iterations(recorded)}"
        written += write_figure(folder, name, charts, title)
    return written


def figure2(groups: Sequence[RunGroup]) -> list[Chart]:
    """The paper's Figure 2: success on the evaluation set, mean turn score, spread of the profile; those that the runs logged."""
    return [chart for key in FIGURE2 if (chart := curve_chart(key, groups))]


def figure3(group: RunGroup) -> list[Chart]:
    """The paper's Figure 3: turn weights of one trajectory, and by class of decision."""
    return [chart for make in (profile_chart, class_chart) if (chart := make([group]))]


def write_figure(folder: Path, name: str, charts: Sequence[Chart], title: str) -> list[Path]:
    """Write charts side by side, at most :data:`PANELS_IN_A_ROW` in a row; returns the files, one a format.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    paths, columns = picture_files(folder, name), min(len(charts), PANELS_IN_A_ROW)
    rows = math.ceil(len(charts) / columns)
    width, height = (max(lengths) for lengths in zip(*map(_size, charts), strict=True))
    with drawing(paths, (width * columns, height * rows), rows, columns, squeeze=False) as (figure, axes):
        for axis, chart in zip_longest(axes.flat, charts):
            if chart is None:
                axis.set_axis_off()
                continue
            _draw(axis, chart)
            axis.set_title(_short(chart["title"], 60))
        figure.suptitle(_short(title, 200))
    return paths


def picture_files(folder: Path, name: str) -> list[Path]:
    """Of a picture, one file a format."""
    return [folder / f"{name}.{suffix}" for suffix in FORMATS]


def _size(chart: Chart) -> tuple[float, float]:
    """Width and height in inches."""
    return 5.2, max(3.0, 1.6 + 0.24 * len(chart.get("turns", ())))


def _draw(axis: Any, chart: Chart) -> None:
    {"classes": _draw_classes, "profile": _draw_profile}.get(chart["name"], _draw_curve)(axis, chart)
    handles, labels = axis.get_legend_handles_labels()
    if labels and chart["name"] == "profile":
        axis.figure.legend(handles, labels, loc="outside lower center", ncols=2)
    elif 1 < len(labels) <= MOST_IN_LEGEND:
        axis.legend()


def _draw_curve(axis: Any, chart: Chart) -> None:
    scale = 100 if chart["percent"] else 1
    for series in chart["series"]:
        group = series["group"]
        colour = {"color": f"C{group}"}
        if series["low"]:
            low, high = ([scale * value for value in series[name]] for name in ("low", "high"))
            axis.fill_between(series["x"], low, high, alpha=0.2, linewidth=0, **colour)
        for run in series["runs"] if len(series["runs"]) > 1 else ():
            values = [scale * value for value in run["y"]]
            axis.plot(run["x"], values, alpha=0.45, linewidth=0.7, **colour)
        marker = {"marker": "o", "markersize": 2.5} if len(series["x"]) <= 40 else {}
        style = {"linestyle": DASHES[group % len(DASHES)], "linewidth": 1.4, "label": _short(series["name"])}
        axis.plot(series["x"], [scale * value for value in series["mean"]], **colour, **marker, **style)
    if chart["warm_up"]:
        axis.margins(x=0.02)
        left, end = axis.get_xlim()[0], min(chart["warm_up"]) - 0.5
        if left < end:  # else the curve begins after it
            axis.axvspan(left, end, alpha=0.1, color="gray", zorder=0)
        for start in (start for start in chart["warm_up"] if start > left):
            axis.axvline(start - 0.5, color="gray", linewidth=0.8, linestyle="--")
    if chart["percent"]:
        axis.set_ylim(bottom=0)
    axis.set_ylabel(f"{chart['axis']} (%)" if chart["percent"] else chart["axis"])
    axis.set_xlabel("iteration")
    axis.xaxis.get_major_locator().set_params(integer=True)


def _draw_classes(axis: Any, chart: Chart) -> None:
    names = list(chart["classes"])
    width = 0.8 / len(chart["series"])
    for number, series in enumerate(chart["series"]):
        shown = [(at, series["means"][name]) for at, name in enumerate(names) if name in series["means"]]
        left = -0.4 + width * (number + 0.5)
        axis.bar(
            [at + left for at, _ in shown],
            [cell["mean"] for _, cell in shown],
            width,
            yerr=[cell["sem"] or 0.0 for _, cell in shown],
            color=f"C{series['group']}",
            label=_short(series["name"]),
        )
    for at, name in enumerate(names):
        counts = [str(series["means"][name]["trajectories"]) for series in chart["series"] if name in series["means"]]
        names[at] = f"{name.replace('/', '/' + chr(10))}\n(n={', '.join(counts)})"
    axis.set_xticks(range(len(names)), names)
    axis.axhline(1.0, color="gray", linewidth=0.8, linestyle="--")
    axis.set_ylabel(chart["axis"])


def _draw_profile(axis: Any, chart: Chart) -> None:
    turns = chart["turns"]
    for number, name in enumerate(chart["classes"]):
        shown = [(at, turn["weight"]) for at, turn in enumerate(turns) if turn["action_class"] == name]
        if shown:
            axis.barh(*zip(*shown, strict=True), color=f"C{number}", label=name or "_")  # which the legend leaves out
    axis.set_yticks(range(len(turns)), [f"T{number}  {_short(turn['action'])}" for number, turn in enumerate(turns, 1)])
    axis.invert_yaxis()
    axis.axvline(1.0, color="gray", linewidth=0.8, linestyle="--")
    axis.set_xlabel(chart["axis"])


def _short(text: str, longest: int = LONGEST_ACTION) -> str:
    # A dollar sign would begin mathematics; what a policy says is shown as it is.
    text = "".join(char if char.isprintable() else " " for char in text)
    text = text if len(text) <= longest else text[: longest - 1] + "…"
    return text.replace("$", r"\$")


def plot_judgement(data: Mapping[str, Any], path: Path) -> None:
    """How far the signed gap tells planned turns from wasted ones.

    Args:
        data: of ``trial_ray.warmstart.judgement.Judgement.figures``, and ``of_turns``, one mapping a turn.
        path: the file to write.
    """
    with drawing([path], (5.5, 3.6)) as (_, axis):
        for planned, name, colour in ((True, "planned", "C0"), (False, "wasted", "C1")):
            gaps = [turn["gap"] for turn in data["of_turns"] if turn["planned"] is planned]
            label = f"{name} ({len(gaps)})"
            axis.hist(gaps, bins=50, range=(-2, 2), density=bool(gaps), histtype="step", color=colour, label=label)
        area = data["auc_wasted"]
        shown = "" if area is None else f"; area under the curve {area[0]:.2f} [{area[1]:.2f}, {area[2]:.2f}]"
        axis.set_title(f"density of the signed gap of turns{shown}")
        axis.set_xlabel("mean gap of a turn's tokens (nats)")
        axis.legend()
