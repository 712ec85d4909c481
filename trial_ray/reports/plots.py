"""Plots as files: curves of runs and sweeps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from trial_ray.errors import MissingDependencyError

# Told apart by everyone, and in grey: dark to light.
COLOURS = ("#1b4965", "#ca6702", "#5fa8d3", "#94a89a", "#8d5a97")
PANELS_IN_A_ROW = 5
LONGEST_ACTION = 34
"""Characters of an action in a figure."""


def plot_dynamics(data: Mapping[str, Any], *paths: Path) -> list[Path]:
    """Figure 2: (a) success on the panel by method, (b) mean turn score, (c) spread of the profile.

    Args:
        data: ``panel`` (by method a list of ``{iteration, mean, runs: [values]}``), ``turn_score`` and ``profile_std`` (by
            method a list of windows), ``hindsight_start_iteration``, ``iterations``, ``title``.
        paths: files to write.
    """
    plt = pyplot()
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.4), layout="constrained")
    names = dict.fromkeys(name for key in ("panel", "turn_score", "profile_std") for name in data[key])
    colours = dict(zip(names, cycle(COLOURS), strict=False))
    for method, points in data["panel"].items():
        colour = colours[method]
        iterations = [point["iteration"] for point in points]
        runs = list(zip(*(point["runs"] for point in points), strict=True))
        for values in runs if len(runs) > 1 else ():
            axes[0].plot(iterations, [100 * value for value in values], color=colour, alpha=0.25, linewidth=0.8)
        means = [100 * point["mean"] for point in points]
        axes[0].plot(iterations, means, color=colour, marker="o", markersize=3, label=method)
    _finish(axes[0], "(a) panel success (%)", data)
    for axis, key, title in (
        (axes[1], "turn_score", "(b) mean turn score (nats)"),
        (axes[2], "profile_std", "(c) standard deviation of the profile"),
    ):
        for method, found in data[key].items():
            centres = [(window["first"] + window["last"]) / 2 for window in found]
            means = [window["mean"] for window in found]
            errors = [window["std"] or 0.0 for window in found]
            style = {"color": colours[method], "marker": "s", "markersize": 3, "capsize": 2}
            axis.errorbar(centres, means, yerr=errors, label=method, **style)
        _finish(axis, title, data)
    figure.suptitle(data["title"], fontsize=10)
    return _save(figure, paths)


def plot_learning(data: Mapping[str, Any], *paths: Path) -> list[Path]:
    """Learning curves: success of the training rollouts on new games, every seed a thin line, and the mean of each method.

    Args:
        data: of ``trial_ray.reports.learning.learning``, with the methods' titles as names, and ``title``.
        paths: files to write.
    """
    plt = pyplot()
    names = list(data["methods"])
    rows, columns = math.ceil(len(names) / PANELS_IN_A_ROW), min(len(names), PANELS_IN_A_ROW)
    size = (1.2 + 2.3 * columns, 0.5 + 2.7 * rows)
    figure, axes = plt.subplots(
        rows, columns, figsize=size, sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    means = {name: _moving_mean(data["methods"][name]["curve"]) for name in names}
    reference = names[0]
    for axis, name, colour in zip(axes.flat, names, cycle(COLOURS), strict=False):
        for values in data["methods"][name]["curves"].values():
            smooth = _moving_mean(values)
            axis.plot(range(1, len(smooth) + 1), smooth, color=colour, alpha=0.35, linewidth=0.7)
        if name != reference:
            shown = range(1, len(means[reference]) + 1)
            axis.plot(shown, means[reference], "k:", linewidth=1.0, label=f"{reference}, mean")
        axis.plot(range(1, len(means[name]) + 1), means[name], color=colour, linewidth=2.0, label=f"{name}, mean")
        axis.set_title(f"{name} ({len(data['methods'][name]['curves'])} seeds)", fontsize=9)
        axis.legend(fontsize=7, loc="lower right")
    for axis in axes.flat[len(names) :]:
        axis.set_axis_off()
    figure.supxlabel("iteration", fontsize=8)
    figure.supylabel("success on new games (%)", fontsize=8)
    figure.suptitle(data["title"], fontsize=10)
    return _save(figure, paths)


def _moving_mean(values: Sequence[float], span: int = 5) -> list[float]:
    """In percent, each over the last ``span`` values or as many as there are."""
    return [100 * sum(values[max(0, end - span) : end]) / min(span, end) for end in range(1, len(values) + 1)]


def plot_judgement(data: Mapping[str, Any], *paths: Path) -> list[Path]:
    """What the hindsight view says of turns: (a) the gap of planned and of wasted ones, (b) the weight by class of decision.

    Args:
        data: of ``trial_ray.warmstart.judgement.Judgement.figures``, and ``of_turns``, one mapping a turn.
        paths: files to write.
    """
    plt = pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
    for planned, name, colour in ((True, "planned", COLOURS[0]), (False, "wasted", COLOURS[1])):
        gaps = [turn["gap"] for turn in data["of_turns"] if turn["planned"] is planned]
        label = f"{name} ({len(gaps)})"
        axes[0].hist(gaps, bins=50, range=(-2, 2), density=bool(gaps), histtype="step", color=colour, label=label)
    area = data["auc_wasted"]
    told = "" if area is None else f"; area under the curve {area[0]:.2f} [{area[1]:.2f}, {area[2]:.2f}]"
    axes[0].set_title(f"(a) density of the signed gap of turns{told}", fontsize=9)
    axes[0].set_xlabel("mean gap of a turn's tokens (nats)", fontsize=8)
    axes[0].legend(fontsize=8)
    names = list(data["classes"])
    figures = [data["classes"][name] for name in names]
    errors = [of["weight_error"] or 0.0 for of in figures]
    axes[1].bar(range(len(names)), [of["weight"] for of in figures], yerr=errors, capsize=3, color=COLOURS[2])
    axes[1].set_xticks(
        range(len(names)), [f"{name}\n(n={of['turns']})" for name, of in zip(names, figures, strict=True)], fontsize=8
    )
    axes[1].axhline(1.0, color="black", linewidth=0.8, linestyle="--")
    axes[1].set_title("(b) mean weight by class of decision, standard error over games", fontsize=9)
    return _save(figure, paths)


def plot_allocation(data: Mapping[str, Any], *paths: Path) -> list[Path]:
    """Figure 3: (a) the weights of one trajectory, turn by turn, (b) mean weight of every class of decision.

    Args:
        data: ``example`` (a trace), ``classes`` (by class ``mean``, ``sem``, ``trajectories``), ``title``.
        paths: files to write.
    """
    plt = pyplot()
    turns, classes = data["example"]["turns"], data["classes"]
    height = max(2.8, 0.27 * len(turns) + 1.2)
    figure, axes = plt.subplots(1, 2, figsize=(12, height), width_ratios=(1.5, 1), layout="constrained")
    colours = dict(zip(data["class_order"], COLOURS, strict=True))
    positions = range(len(turns))
    axes[0].barh(positions, [turn["weight"] for turn in turns], color=[colours[turn["action_class"]] for turn in turns])
    axes[0].set_yticks(
        positions, [f"T{index + 1}  {_short(turn['action'])}" for index, turn in enumerate(turns)], fontsize=8
    )
    axes[0].invert_yaxis()
    axes[0].axvline(1.0, color="black", linewidth=0.8, linestyle="--")
    axes[0].set_title("(a) turn weights of one trajectory", fontsize=9)
    names = [name for name in data["class_order"] if name in classes]
    means, errors = [classes[name]["mean"] for name in names], [classes[name]["sem"] or 0.0 for name in names]
    axes[1].bar(range(len(names)), means, yerr=errors, capsize=3, color=[colours[name] for name in names])
    labels = [f"{name.replace('/', '/' + chr(10))}\n(n={classes[name]['trajectories']})" for name in names]
    axes[1].set_xticks(range(len(names)), labels, fontsize=8)
    axes[1].axhline(1.0, color="black", linewidth=0.8, linestyle="--")
    axes[1].set_title("(b) mean weight by class of decision, SEM over trajectories", fontsize=9)
    figure.suptitle(data["title"], fontsize=10)
    return _save(figure, paths)


def plot_curve(chart: Mapping[str, Any], *paths: Path) -> list[Path]:
    """One metric over iterations, a line and a band for each group of runs.

    Args:
        chart: of :func:`trial_ray.reports.charts.curve_chart`.
        paths: files to write.
    """
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(5, 3.2), layout="constrained")
    scale = 100 if chart["percent"] else 1
    for colour, series in zip(cycle(COLOURS), chart["series"], strict=False):
        x, mean = series["x"], [scale * value for value in series["mean"]]
        axis.plot(x, mean, color=colour, marker="o", markersize=2.5, linewidth=1.2, label=_short(series["name"]))
        if series["low"]:
            bounds = ([scale * value for value in series[name]] for name in ("low", "high"))
            axis.fill_between(x, *bounds, color=colour, alpha=0.2, linewidth=0)
    for start in chart["warm_up"]:
        axis.axvline(start - 0.5, color="0.4", linewidth=0.8, linestyle="--")
    if chart["warm_up"]:
        axis.axvspan(axis.get_xlim()[0], min(chart["warm_up"]) - 0.5, color="0.92", zorder=0)
        axis.margins(x=0)
    axis.set_ylabel(f"{chart['axis']} (%)" if chart["percent"] else chart["axis"], fontsize=8)
    _label(axis, chart["title"])
    return _save(figure, paths)


def _finish(axis: Any, title: str, data: Mapping[str, Any]) -> None:
    start = data["hindsight_start_iteration"]
    axis.axvspan(0.5, start - 0.5, color="0.92", zorder=0)
    axis.axvline(start - 0.5, color="0.4", linewidth=0.8, linestyle="--")
    axis.set_xlim(0.5, data["iterations"] + 0.5)
    _label(axis, title)


def _label(axis: Any, title: str) -> None:
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_xlabel("iteration", fontsize=8)
    axis.set_title(title, fontsize=9)
    axis.tick_params(labelsize=8)
    if axis.get_legend_handles_labels()[1]:
        axis.legend(fontsize=8, frameon=False)


def _short(text: str) -> str:
    # A dollar sign would begin mathematics; what a policy says is shown as it is.
    text = "".join(char if char.isprintable() else " " for char in text).replace("$", r"\$")
    return text if len(text) <= LONGEST_ACTION else text[: LONGEST_ACTION - 1] + "…"


def _save(figure: Any, paths: Sequence[Path]) -> list[Path]:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    return list(paths)


def pyplot() -> Any:
    """Matplotlib's pyplot, drawing into files, without the figures of earlier calls.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise MissingDependencyError(
            "Figures need matplotlib, which is not installed; install it with `pip install 'trial-ray[reports]'`."
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.close("all")
    return pyplot


SYMBOLS = {"hindsight_coeff": "λ (hindsight_coeff)", "clamp_alpha": "α (clamp_alpha)"}
"""The settings that the map shows where they are searched, as the paper calls them."""
COLOUR_MAP = "viridis"
MOST_CELLS = 12
"""Values of a setting up to which it makes rows or columns of cells."""
LOG_RATIO = 30
"""Largest over smallest value from which a positive setting is shown on a logarithmic axis."""

PointValue = tuple[dict[str, Any], float, float | None]
"""Parameters, mean over seeds, half of its 95 % interval."""


def plot_map(points: Sequence[PointValue], metric: str, path: Path) -> list[Path]:
    """Two settings against each other: cells where they form a grid, else a dot a point.

    Each cell holds mean ± half the 95 % interval over seeds; over the points in it where more settings than two were chosen.

    Args:
        points: that have a value.
        metric: what the value is.
        path: of the files, without suffix.

    Returns:
        The files; none where fewer than two numeric settings took several values.
    """
    names = _numeric(points)
    if len(names) < 2:
        return []
    across, down = [*(name for name in SYMBOLS if name in names), *(name for name in names if name not in SYMBOLS)][:2]
    cells: dict[tuple[float, float], list[PointValue]] = {}
    for point in points:
        cells.setdefault((point[0][across], point[0][down]), []).append(point)
    columns, rows = sorted({x for x, _ in cells}), sorted({y for _, y in cells})
    plt = pyplot()
    gridded = max(len(columns), len(rows)) <= MOST_CELLS and len(cells) * 2 >= len(columns) * len(rows)
    size = (2.2 + 1.25 * len(columns), 1.6 + 0.75 * len(rows)) if gridded else (5.5, 4.2)
    figure, axis = plt.subplots(figsize=(max(4.0, size[0]), max(2.6, size[1])), layout="constrained")
    drawn = _cells(axis, cells, columns, rows) if gridded else _dots(axis, cells)
    figure.colorbar(drawn, ax=axis, label=metric.rpartition("/")[2])
    axis.set_xlabel(SYMBOLS.get(across, across))
    axis.set_ylabel(SYMBOLS.get(down, down))
    if gridded and any(half is not None for _, _, half in points):
        axis.set_title("mean ± 95 % interval over seeds", fontsize=9)
    return _save_sweep(figure, path)


def _cells(
    axis: Any, cells: dict[tuple[float, float], list[PointValue]], columns: list[float], rows: list[float]
) -> Any:
    import numpy as np

    means = np.full((len(rows), len(columns)), np.nan)
    texts: dict[tuple[int, int], str] = {}
    for (x, y), found in cells.items():
        row, column = rows.index(y), columns.index(x)
        means[row, column] = sum(mean for _, mean, _ in found) / len(found)
        half = found[0][2] if len(found) == 1 else None
        texts[row, column] = f"{means[row, column]:.3g}" + (f"\n± {half:.2g}" if half is not None else "")
    image = axis.imshow(means, origin="lower", aspect="auto", cmap=COLOUR_MAP)
    for (row, column), text in texts.items():
        dark = image.norm(means[row, column]) < 0.6
        axis.text(column, row, text, ha="center", va="center", fontsize=9, color="white" if dark else "black")
    axis.set_xticks(range(len(columns)), [f"{value:g}" for value in columns])
    axis.set_yticks(range(len(rows)), [f"{value:g}" for value in rows])
    return image


def _dots(axis: Any, cells: dict[tuple[float, float], list[PointValue]]) -> Any:
    drawn = [(x, y, mean) for (x, y), found in cells.items() for _, mean, _ in found]
    xs, ys, values = zip(*drawn, strict=True)
    dots = axis.scatter(xs, ys, c=values, cmap=COLOUR_MAP, s=70, edgecolors="black", linewidths=0.6)
    for scale, coordinates in ((axis.set_xscale, xs), (axis.set_yscale, ys)):
        if _logarithmic(coordinates):
            scale("log")
    axis.grid(alpha=0.25)
    return dots


def plot_parallel(points: Sequence[PointValue], metric: str, path: Path) -> list[Path]:
    """Every point as a line over the settings that took several values, ending at its value, which also colours it.

    Args:
        points: that have a value.
        metric: what the value is.
        path: of the files, without suffix.

    Returns:
        The files; none for fewer than two points, or where no setting took several values.
    """
    names = [name for name in _names(points) if len({str(point[0].get(name)) for point in points}) > 1]
    if len(points) < 2 or not names:
        return []
    plt = pyplot()
    import matplotlib

    last = metric.rpartition("/")[2]
    axes = [_Axis(name, [point[0].get(name) for point in points]) for name in names]
    axes.append(_Axis(last, [mean for _, mean, _ in points]))
    figure, axis = plt.subplots(figsize=(2.2 * len(axes) + 1, 3.8), layout="constrained")
    colours = matplotlib.colormaps[COLOUR_MAP]
    for index in sorted(range(len(points)), key=lambda index: points[index][1]):
        heights = [each.heights[index] for each in axes]
        axis.plot(range(len(axes)), heights, color=colours(axes[-1].heights[index]), linewidth=1.8, alpha=0.85)
    for position, each in enumerate(axes):
        axis.axvline(position, color="black", linewidth=0.8)
        for height, label in each.ticks():
            axis.annotate(
                label,
                (position, height),
                (5, 0),
                textcoords="offset points",
                fontsize=8,
                va="center",
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
            )
    axis.set_xticks(range(len(axes)), [SYMBOLS.get(each.title, each.title) for each in axes])
    axis.set_xlim(-0.15, len(axes) - 1 + 0.45)
    axis.set_yticks([])
    for side in axis.spines.values():
        side.set_visible(False)
    return _save_sweep(figure, path)


class _Axis:
    """One axis of the parallel coordinates: where values lie between 0 and 1."""

    def __init__(self, title: str, values: Sequence[Any]) -> None:
        numbers = all(map(_is_number, values))
        self.categories = [] if numbers else sorted({str(value) for value in values})
        self.logarithmic = numbers and _logarithmic(values)
        self.title = f"{title} (log)" if self.logarithmic else title
        if self.categories:
            positions = [float(self.categories.index(str(value))) for value in values]
        else:
            positions = [math.log(value) if self.logarithmic else float(value) for value in values]
        self.low, self.high = min(positions), max(positions)
        self.heights = [self._height(position) for position in positions]
        self.values = values

    def _height(self, position: float) -> float:
        return 0.5 if self.high == self.low else (position - self.low) / (self.high - self.low)

    def ticks(self) -> list[tuple[float, str]]:
        """Height and label of every distinct value, or of both ends and the middle where there are many."""
        if self.categories:
            return [(self._height(float(index)), name) for index, name in enumerate(self.categories)]
        distinct = sorted(set(zip(self.heights, self.values, strict=True)))
        if len(distinct) > 6:
            ends = [(share, self.low + share * (self.high - self.low)) for share in (0.0, 0.5, 1.0)]
            return [(share, f"{math.exp(at) if self.logarithmic else at:.3g}") for share, at in ends]
        return [(height, f"{value:.4g}") for height, value in distinct]


def _names(points: Sequence[PointValue]) -> list[str]:
    return sorted({name for parameters, _, _ in points for name in parameters})


def _numeric(points: Sequence[PointValue]) -> list[str]:
    """Settings that took several values, all of them finite numbers."""
    found = []
    for name in _names(points):
        values = [parameters.get(name) for parameters, _, _ in points]
        if all(map(_is_number, values)) and len(set(values)) > 1:
            found.append(name)
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _logarithmic(values: Sequence[float]) -> bool:
    return min(values) > 0 and max(values) / min(values) >= LOG_RATIO


def _save_sweep(figure: Any, path: Path) -> list[Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [path.with_suffix(suffix) for suffix in (".png", ".svg")]
    for file in files:
        figure.savefig(file, dpi=150)
    pyplot().close(figure)
    return files
