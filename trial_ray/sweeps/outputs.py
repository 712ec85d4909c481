"""Outputs of a sweep: tables, plots, and the best configuration as an experiment file."""

from __future__ import annotations

import math
import pprint
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trial_ray.algorithms.config import plain
from trial_ray.errors import ConfigError, first_line
from trial_ray.files import examples_folder, write_text
from trial_ray.reports.plots import drawing, picture_files
from trial_ray.runs.config_record import is_json
from trial_ray.runs.experiment import experiment_file
from trial_ray.sweeps.plan import SweepFile
from trial_ray.sweeps.result import SweepResult

BEST = "best.py"
WIDTH = 120


def write_outputs(file: SweepFile, result: SweepResult, folder: Path) -> Iterator[str]:
    """Write all outputs and yield a message for each of them.

    The results are saved first. An error in the plots or in ``best.py`` is yielded as a message and does not affect the others.

    Args:
        file: the sweep file.
        result: results of the sweep.
        folder: folder of the sweep.
    """
    result.save(folder)
    yield f"table: {folder / 'results.csv'}"
    for part, written in (("pictures", _pictures(result, folder)), (BEST, _best(file, result, folder))):
        try:
            yield from written
        except Exception as error:
            yield f"no {part}: {first_line(error)}"


def _pictures(result: SweepResult, folder: Path) -> Iterator[str]:
    points = [(each.parameters, each.mean, each.half_width) for each in result.points() if each.mean is not None]
    if files := plot_map(points, result.metric, folder / "map"):
        yield f"map: {files[0]} (and {files[1].suffix})"


def _best(file: SweepFile, result: SweepResult, folder: Path) -> Iterator[str]:
    best = result.best()
    if best is None:
        yield f"no {BEST}: no successful trial has a finite {result.metric}"
        return
    chosen = ", ".join(f"{name} = {best.parameters[name]!r}" for name in result.names)
    point = result.points()[0]
    lacks = f"; no point is complete, this one lacks {point.lacks}" if point.lacks else ""
    of = f"The best of {len(result.points())} points of {file.path.name}"
    write_best(file, best.parameters, f"{of}: {chosen}; {result.metric} {point}{lacks}.", folder / BEST)
    yield f"best: {chosen}{lacks}; trial-ray train {folder / BEST}"


def write_best(file: SweepFile, parameters: Mapping[str, Any], summary: str, path: Path) -> None:
    """Write an experiment file with the sweep file's config at one point, and the sweep's overrides and ``stop``.

    The written file reads the sweep file again, and refuses it if it defines another sweep by then.

    Args:
        file: the sweep file, which the written file loads.
        parameters: values of the point, by dotted path.
        summary: docstring of the written file.
        path: path of the written file.

    Raises:
        ConfigError: a value of the point cannot be written as Python.
    """
    chosen = {name: parameters[name] for name in file.searched}
    if objects := [name for name, value in chosen.items() if not is_json(plain(value))]:
        raise ConfigError(f"the value of {objects[0]} is an object of the sweep file: {chosen[objects[0]]!r:.200}")
    docstring = textwrap.fill(summary.replace("\\", "\\\\").replace('"', "'"), WIDTH - 6)
    path_or_name, examples = file.path.resolve(), examples_folder().resolve()
    if path_or_name.is_relative_to(examples):  # found wherever the package is
        path_or_name = path_or_name.relative_to(examples).with_suffix("")
    text = f"""from trial_ray.sweeps.plan import at_point
from trial_ray.sweeps.outputs import load_unchanged

sweep = load_unchanged({str(path_or_name)!r}, {file.iterations}, {_literal(list(file.overrides))}, {file.key!r})
config = at_point(sweep.config, {_literal(plain(chosen))})
stop = {_literal(file.stop)}
"""
    numbers = "from math import inf\n\n" if re.search(r"\binf\b", text) else ""
    write_text(path, f'"""{docstring}"""\n\n{numbers}{text}')


def load_unchanged(name: str, iterations: int | None, overrides: list[str], key: str) -> SweepFile:
    """Read the file of an earlier sweep, as :func:`write_best` names it.

    Args:
        name: path of the file, or its name among the tuned examples.
        iterations: as for :meth:`SweepFile.load`.
        overrides: as for :meth:`SweepFile.load`.
        key: :attr:`SweepFile.key` at the time of the sweep.

    Raises:
        ConfigError: the file defines another sweep than it did then.
    """
    file = SweepFile.load(experiment_file(name), iterations, overrides)
    if file.key != key:
        raise ConfigError(
            f"{file.path} defines another sweep than the one whose best point this is. Restore the file, or give its path as it "
            "was then."
        )
    return file


def _literal(value: Any) -> str:
    """Plain values as Python."""
    return pprint.pformat(value, width=WIDTH - 30, sort_dicts=False)


# -- pictures --------------------------------------------------------------------------------------------------------------

SYMBOLS = {"hindsight_coeff": "λ (hindsight_coeff)", "clamp_alpha": "α (clamp_alpha)"}
"""Settings that the map prefers for its axes if they are searched, with axis labels in the paper's notation."""
COLOUR_MAP = "viridis"
MOST_CELLS = 12
"""Maximum number of rows and of columns of the map."""

PointValue = tuple[dict[str, Any], float, float | None]
"""Parameters of a point, mean over seeds, and half of the mean's 95 % interval (``None`` if there is no interval)."""


def plot_map(points: Sequence[PointValue], metric: str, path: Path) -> list[Path]:
    """Plot a metric over two settings that form a grid.

    Each cell shows the mean ± half of the 95 % interval over seeds. If more than two settings were searched, a cell with several
    points shows the mean of the points without an interval.

    Args:
        points: points that have a value.
        metric: result key of the values.
        path: path of the files, without suffix.

    Returns:
        The written files; empty if fewer than two numeric settings took several values, or if these do not form a grid.
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


def _varied(points: Sequence[PointValue]) -> list[str]:
    """Return the settings that took several values, in alphabetical order."""
    names = sorted({name for parameters, _, _ in points for name in parameters})
    return [name for name in names if len({str(point[0].get(name)) for point in points}) > 1]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
