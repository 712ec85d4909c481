"""Figures drawn by matplotlib: charts of a report, figures of the TRIAL paper, and the plot of ``evaluate --hindsight``."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trial_envs.core.extras import install_command
from trial_ray.adapters.adapter import ACTION_CLASSES
from trial_ray.errors import MissingDependencyError, UserInputError
from trial_ray.files import Record, visible, writing
from trial_ray.metrics import EVALUATION_SUCCESS, PROFILE_STD, TURN_SCORE
from trial_ray.reports.charts import CURVES, class_chart, curve_chart, profile_chart
from trial_ray.reports.groups import RunGroup, recorded_iterations

STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "trial_ray", "text.parse_math": False}
FORMATS = ("png", "svg")
FIGURE2 = (EVALUATION_SUCCESS, TURN_SCORE, PROFILE_STD)
"""Metrics of the TRIAL paper's Figure 2: success on the evaluation set, mean turn score, spread of the turn weights."""
MAX_IN_LEGEND = 8


@contextmanager
def drawing(
    paths: Sequence[Path | io.StringIO], size: tuple[float, float], columns: int = 1
) -> Iterator[tuple[Any, Any]]:
    """Create a figure, which is written to ``paths`` at the end of the context.

    Args:
        paths: files to write, in the format of their suffixes, and text buffers to write as SVG.
        size: width and height in inches.
        columns: number of axes, side by side.

    Yields:
        The figure, and its axis or an array of its axes.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        UserInputError: values to draw are too large for matplotlib.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            f"Figures need matplotlib, which is not installed; install it with `{install_command('reports')}`."
        ) from error
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        # Ignore warnings about characters that the installed fonts lack, and about numbers that are not finite.
        warnings.simplefilter("ignore")
        figure = Figure(figsize=size, layout="constrained")
        try:
            yield figure, figure.subplots(1, columns)
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
            raise UserInputError(f"The numbers are too large to be drawn ({error}).") from error


Chart = Record


def chart_svg(chart: Chart) -> str:
    """Draw a chart of :mod:`trial_ray.reports.charts` as an SVG document; raises the same errors as :func:`drawing`."""
    buffer = io.StringIO()
    _draw([buffer], [chart])
    return buffer.getvalue()


def write_figures(groups: Sequence[RunGroup], folder: Path) -> list[Path]:
    """Draw each metric of :data:`~trial_ray.reports.charts.CURVES` that runs logged, and the TRIAL paper's Figures 2 and 3.

    ``figure2`` is written only if all of its metrics were logged. ``figure3`` is written for each group of runs that recorded turn
    weights; if there are several such groups, the figures are named ``figure3_1``, ``figure3_2`` and so on.

    Args:
        groups: groups of runs.
        folder: folder of the files.

    Returns:
        Paths of the PNG and the SVG file of every figure.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    title = "; ".join(group.title for group in groups)
    curves = {key: chart for key in CURVES if (chart := curve_chart(key, groups))}
    figures = [(CURVES[key].name, [chart], title) for key, chart in curves.items()]
    if curves.keys() >= set(FIGURE2):
        figures.append(("figure2", [curves[key] for key in FIGURE2], title))
    weighted = [(group, recorded) for group in groups if (recorded := [run for run in group.runs if run.allocation])]
    for number, (group, recorded) in enumerate(weighted, start=1):
        charts = [chart for make in (profile_chart, class_chart) if (chart := make([group]))]
        title = f"{group.title_of(recorded)}: {recorded_iterations(recorded)}"
        figures.append(("figure3" if len(weighted) == 1 else f"figure3_{number}", charts, title))
    for name, charts, title in figures:
        _draw(picture_files(folder, name), charts, title)
    return [path for name, _, _ in figures for path in picture_files(folder, name)]


def picture_files(folder: Path, name: str) -> list[Path]:
    """Return the paths of a figure's files, one per format."""
    return [folder / f"{name}.{suffix}" for suffix in FORMATS]


def _draw(paths: Sequence[Path | io.StringIO], charts: Sequence[Chart], title: str = "") -> None:
    """Draw charts side by side; if ``title`` is not empty, each chart also shows its own title."""
    height = max(3.6, *(1.6 + 0.24 * len(chart.get("turns", ())) for chart in charts))
    with drawing(paths, (6.4 * len(charts), height), len(charts)) as (figure, _):
        for axis, chart in zip(figure.axes, charts, strict=True):
            {"classes": _draw_classes, "profile": _draw_profile}.get(chart["name"], _draw_curve)(axis, chart)
            if 1 < len(axis.get_legend_handles_labels()[1]) <= MAX_IN_LEGEND:
                # The bars of the chart "profile" leave no room for a legend inside the axes.
                axis.legend(**({"loc": "upper left", "bbox_to_anchor": (1, 1)} if chart["name"] == "profile" else {}))
            axis.set_title(chart["title"] if title else "")
        figure.suptitle(_short(title, 200))


def _draw_curve(axis: Any, chart: Chart) -> None:
    scale = 100 if chart["percent"] else 1
    for series in chart["series"]:
        colour = f"C{series['group']}"
        if series["low"]:
            low, high = ([scale * value for value in series[name]] for name in ("low", "high"))
            axis.fill_between(series["x"], low, high, alpha=0.2, color=colour)
        for run in series["runs"] if len(series["runs"]) > 1 else ():
            axis.plot(run["x"], [scale * value for value in run["y"]], alpha=0.45, linewidth=0.7, color=colour)
        mean = [scale * value for value in series["mean"]]
        axis.plot(series["x"], mean, ".-", color=colour, label=_short(series["name"]))
    left = axis.get_xlim()[0]
    for start in chart["warm_up"]:
        if left < start - 0.5:  # `start` is the first iteration with the dense loss: shade the iterations before it.
            axis.axvspan(left, start - 0.5, alpha=0.1, color="gray")
    if chart["percent"]:
        axis.set_ylim(bottom=0)
    axis.set_ylabel(f"{chart['axis']} (%)" if chart["percent"] else chart["axis"])
    axis.set_xlabel("iteration")
    axis.xaxis.get_major_locator().set_params(integer=True)


def _draw_classes(axis: Any, chart: Chart) -> None:
    classes, width = chart["classes"], 0.8 / len(chart["series"])
    for number, series in enumerate(chart["series"]):
        bars = [(index, series["means"][name]) for index, name in enumerate(classes) if name in series["means"]]
        places = [index - 0.4 + width * (number + 0.5) for index, _ in bars]
        errors = [cell["sem"] or 0.0 for _, cell in bars]
        style = {"color": f"C{series['group']}", "label": _short(series["name"])}
        axis.bar(places, [cell["mean"] for _, cell in bars], width, yerr=errors, **style)
    labels: list[str] = []
    for name in classes:
        cells = [series["means"][name] for series in chart["series"] if name in series["means"]]
        labels.append(name.replace("/", "/\n") + f"\n(n={', '.join(str(cell['trajectories']) for cell in cells)})")
    axis.set_xticks(range(len(labels)), labels)
    axis.axhline(1.0, color="gray", linestyle="--")
    axis.set_ylabel(chart["axis"])


def _draw_profile(axis: Any, chart: Chart) -> None:
    turns = chart["turns"]
    for number, name in enumerate((*ACTION_CLASSES, "")):
        if weights := {index: turn.turn_weight for index, turn in enumerate(turns) if turn.action_class == name}:
            # The legend omits labels that begin with an underscore.
            axis.barh([*weights], [*weights.values()], color=f"C{number}", label=name or "_")
    axis.set_yticks(
        range(len(turns)), [f"T{number}  {_short(turn.turn.action)}" for number, turn in enumerate(turns, 1)]
    )
    axis.invert_yaxis()
    axis.axvline(1.0, color="gray", linestyle="--")
    axis.set_xlabel(chart["axis"])


def _short(text: str, max_length: int = 34) -> str:
    text = visible(text).replace("\n", " ")
    return text if len(text) <= max_length else text[: max_length - 1] + "…"


def plot_agreement(data: Record, path: Path) -> None:
    """Plot histograms of the hindsight log-ratios of turns, which ``evaluate --hindsight`` measures.

    One histogram has the turns with an action that the expert could have chosen ("planned"), the other has all other turns
    ("wasted").

    Args:
        data: result of ``trial_ray.warmstart.agreement.Agreement.to_dict``.
        path: the file to write.
    """
    with drawing([path], (6.4, 3.6)) as (_, axis):
        for planned, name in ((True, "planned"), (False, "wasted")):
            gaps = [turn["gap"] for turn in data["of_turns"] if turn["planned"] is planned]
            label = f"{name} ({len(gaps)})"
            axis.hist(gaps, bins=50, range=(-2, 2), density=bool(gaps), histtype="step", label=label)
        area = data["auc_wasted"]
        shown = "" if area is None else f"; area under the curve {area[0]:.2f} [{area[1]:.2f}, {area[2]:.2f}]"
        axis.set_title(f"density of the signed gap of turns{shown}")
        axis.set_xlabel("mean gap of a turn's tokens (nats)")
        axis.legend()
