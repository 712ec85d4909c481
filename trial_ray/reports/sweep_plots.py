"""The pictures of a sweep as PNG and SVG: two settings against each other, and all of them as parallel coordinates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trial_ray.reports.plots import pyplot

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
    return _save(figure, path)


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
    return _save(figure, path)


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


def _save(figure: Any, path: Path) -> list[Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [path.with_suffix(suffix) for suffix in (".png", ".svg")]
    for file in files:
        figure.savefig(file, dpi=150)
    pyplot().close(figure)
    return files
