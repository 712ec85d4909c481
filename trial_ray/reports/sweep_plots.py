"""Pictures of a sweep: a map of two settings, and all settings as parallel coordinates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trial_ray.reports.plots import drawing, picture_files

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
    """Two settings that form a grid against each other.

    Each cell holds mean ± half the 95 % interval over seeds; over the points in it where more settings than two were chosen.

    Args:
        points: that have a value.
        metric: what the value is.
        path: of the files, without suffix.

    Returns:
        The files; none where fewer than two numeric settings took several values, or they form no grid.
    """
    names = [name for name in _varied(points) if all(_is_number(point[0].get(name)) for point in points)]
    if len(names) < 2:
        return []
    across, down = [*filter(names.__contains__, SYMBOLS), *(name for name in names if name not in SYMBOLS)][:2]
    cells: dict[tuple[float, float], list[PointValue]] = {}
    for point in points:
        cells.setdefault((point[0][across], point[0][down]), []).append(point)
    columns, rows = sorted({x for x, _ in cells}), sorted({y for _, y in cells})
    if max(len(columns), len(rows)) > MOST_CELLS or len(cells) * 2 < len(columns) * len(rows):
        return []
    files = picture_files(path.parent, path.name)
    with drawing(files, (max(4.0, 2.2 + 1.25 * len(columns)), max(2.6, 1.6 + 0.75 * len(rows)))) as (figure, axis):
        figure.colorbar(_cells(axis, cells, columns, rows), ax=axis, label=metric.rpartition("/")[2])
        axis.set_xlabel(SYMBOLS.get(across, across))
        axis.set_ylabel(SYMBOLS.get(down, down))
        if any(half is not None for _, _, half in points):
            axis.set_title("mean ± 95 % interval over seeds")
    return files


def _cells(
    axis: Any, cells: dict[tuple[float, float], list[PointValue]], columns: list[float], rows: list[float]
) -> Any:
    means = [[math.nan] * len(columns) for _ in rows]
    for (x, y), found in cells.items():
        means[rows.index(y)][columns.index(x)] = sum(mean for _, mean, _ in found) / len(found)
    image = axis.imshow(means, origin="lower", aspect="auto", cmap=COLOUR_MAP)
    for (x, y), found in cells.items():
        row, column = rows.index(y), columns.index(x)
        mean, half = means[row][column], found[0][2] if len(found) == 1 else None
        text = f"{mean:.3g}" + (f"\n± {half:.2g}" if half is not None else "")
        colour = "white" if image.norm(mean) < 0.6 else "black"
        axis.text(column, row, text, ha="center", va="center", fontsize=9, color=colour)
    axis.set_xticks(range(len(columns)), [f"{value:g}" for value in columns])
    axis.set_yticks(range(len(rows)), [f"{value:g}" for value in rows])
    return image


def plot_parallel(points: Sequence[PointValue], metric: str, path: Path) -> list[Path]:
    """Every point as a line over the settings that took several values, ending at its value, which also colours it.

    Args:
        points: that have a value.
        metric: what the value is.
        path: of the files, without suffix.

    Returns:
        The files; none for fewer than two points, or where no setting took several values.
    """
    names = _varied(points)
    if len(points) < 2 or not names:
        return []
    columns = {SYMBOLS.get(name, name): [point[0].get(name) for point in points] for name in names}
    columns[metric.rpartition("/")[2]] = [mean for _, mean, _ in points]
    scaled = [_scaled(values) for values in columns.values()]
    files = picture_files(path.parent, path.name)
    with drawing(files, (2.2 * len(scaled) + 1, 3.8)) as (_, axis):
        from matplotlib import colormaps

        for index in sorted(range(len(points)), key=lambda index: points[index][1]):
            heights = [heights[index] for heights, _ in scaled]
            axis.plot(heights, color=colormaps[COLOUR_MAP](heights[-1]), linewidth=1.8, alpha=0.85)
        box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
        for at, (_, ticks) in enumerate(scaled):
            axis.axvline(at, color="black", linewidth=0.8)
            for height, label in ticks.items():
                axis.annotate(label, (at, height), (5, 0), textcoords="offset points", va="center", bbox=box)
        logs = [" (log)" if _logarithmic(values) else "" for values in columns.values()]
        axis.set_xticks(range(len(scaled)), [f"{name}{log}" for name, log in zip(columns, logs, strict=True)])
        axis.set_xlim(-0.15, len(scaled) - 1 + 0.45)
        axis.set_yticks([])
        axis.spines[:].set_visible(False)
    return files


def _scaled(values: Sequence[Any]) -> tuple[list[float], dict[float, str]]:
    """Heights of values between 0 and 1; height and label of every distinct value, or of both ends and the middle of many."""
    numbers, logarithmic = all(map(_is_number, values)), _logarithmic(values)
    names = sorted(set(map(str, values)))
    positions = [
        math.log(value) if logarithmic else float(value) if numbers else float(names.index(str(value)))
        for value in values
    ]
    low, high = min(positions), max(positions)
    heights = [0.5 if high == low else (position - low) / (high - low) for position in positions]
    if not numbers:
        return heights, dict(zip(heights, map(str, values), strict=True))
    if len(set(heights)) <= 6:
        return heights, {height: f"{value:.4g}" for height, value in zip(heights, values, strict=True)}
    ends = {share: low + share * (high - low) for share in (0.0, 0.5, 1.0)}
    return heights, {share: f"{math.exp(at) if logarithmic else at:.3g}" for share, at in ends.items()}


def _varied(points: Sequence[PointValue]) -> list[str]:
    """Settings that took several values, in alphabetical order."""
    names = sorted({name for parameters, _, _ in points for name in parameters})
    return [name for name in names if len({str(point[0].get(name)) for point in points}) > 1]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _logarithmic(values: Sequence[Any]) -> bool:
    return all(map(_is_number, values)) and min(values) > 0 and max(values) / min(values) >= LOG_RATIO
