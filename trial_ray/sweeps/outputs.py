"""Output of a sweep: tables, pictures, and the best configuration as an experiment file."""

from __future__ import annotations

import math
import pprint
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trial_ray.algorithms.methods import method_of
from trial_ray.errors import first_line
from trial_ray.files import write_text
from trial_ray.reports.plots import drawing, picture_files
from trial_ray.runs.config_record import DERIVED, is_json
from trial_ray.runs.overrides import settable_names
from trial_ray.sweeps.file import SweepFile, at_point
from trial_ray.sweeps.result import SweepResult

if TYPE_CHECKING:
    from trial_ray.algorithms.config import GRPOConfig

BEST = "best.py"


def write_outputs(file: SweepFile, result: SweepResult, folder: Path) -> Iterator[str]:
    """Write everything; yields a line on each thing that a user would look for, and on what could not be written.

    What the trials cost must not be lost to a picture: whatever one part raises, the others are written.

    Args:
        file: what was searched.
        result: what came out.
        folder: of the sweep.
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
        yield f"no {BEST}: no trial that did not fail has a finite {result.metric}"
        return
    values = {path: best.parameters[path] for path in file.searched}
    chosen = ", ".join(f"{name} = {best.parameters[name]!r}" for name in result.names)
    point = result.points()[0]
    lacks = f"; no point is complete, this one lacks {point.lacks}" if point.lacks else ""
    summary = (
        f"The best of {len(result.points())} points of {file.path.name}: {chosen}; {result.metric} {point}{lacks}."
    )
    config = at_point(file.config, values)
    chosen_names = [path.partition(".")[0] for path in values]
    write_experiment(folder / BEST, config, file.stop, summary, file.path, chosen_names, file.overrides)
    yield f"best: {chosen}{lacks}; trial-ray train {folder / BEST}"


WIDTH = 120


def write_experiment(
    path: Path,
    config: GRPOConfig,
    stop: dict[str, float],
    summary: str,
    source: Path,
    chosen: Iterable[str],
    overrides: Sequence[str] = (),
) -> None:
    """Write an experiment file that gives ``config`` and ``stop``.

    It states every setting that differs from its default. Where some of them are objects, such as an adapter of the user's
    own, it takes the config of the file that made them, and states overrides and what was chosen.

    Args:
        path: of the file.
        config: without search values.
        stop: as in an experiment file.
        summary: the file's docstring.
        source: the file that ``config`` was made from.
        chosen: names of the settings in which it differs from what is in ``source`` with the overrides.
        overrides: ``key=value`` each, set in the config of ``source``.
    """
    body = _from_source(config, source, chosen, overrides) if _has_objects(config) else _whole_config(config)
    docstring = textwrap.fill(summary.replace("\\", "\\\\").replace('"', "'"), WIDTH - 6)
    text = "\n".join([*body, f"stop = {literal(stop)}", ""])
    numbers = ["from math import inf", ""] if re.search(r"\binf\b", text) else []
    write_text(path, "\n".join([f'"""{docstring}"""', "", *numbers, text]))


def _from_source(config: GRPOConfig, source: Path, chosen: Iterable[str], overrides: Sequence[str]) -> list[str]:
    # load_experiment finds modules beside the file.
    return [
        "from trial_ray.runs.experiment import load_experiment",
        "from trial_ray.runs.overrides import apply_overrides",
        "",
        f"source = load_experiment({literal(str(source.resolve()))}).config",
        f"config = apply_overrides(source, {literal(list(overrides))})",
        *_assigned(config, sorted(set(chosen))),
    ]


def _whole_config(config: GRPOConfig) -> list[str]:
    played = ("environments",) if config.environments else ("env", "env_config")
    chosen = {name: getattr(config, name) for name in played}
    # An environment brings defaults of its own.
    defaults = vars(type(config)().environment(**chosen))
    names = set(settable_names(vars(config))) & defaults.keys() - DERIVED - chosen.keys()
    changed = sorted(name for name in names if getattr(config, name) != defaults[name])
    keywords = ", ".join(f"{name}={literal(value)}" for name, value in chosen.items())
    return [
        "from trial_ray.algorithms.methods import new_config",
        "",
        f"config = new_config({literal(method_of(config))}).environment({keywords})",
        *_assigned(config, changed),
    ]


def _assigned(config: GRPOConfig, names: Iterable[str]) -> list[str]:
    return [f"config.{name} = {literal(getattr(config, name))}" for name in names]


def _has_objects(config: GRPOConfig) -> bool:
    """Whether a setting that differs from its default cannot be written down."""
    defaults = vars(type(config)())
    return any(
        not is_json(value) and repr(value) != repr(defaults[name])
        for name, value in vars(config).items()
        if not name.startswith("_") and name not in DERIVED and name in defaults
    )


def literal(value: Any) -> str:
    """Plain values as Python."""
    return pprint.pformat(value, width=WIDTH - 30, sort_dicts=False)


# -- pictures --------------------------------------------------------------------------------------------------------------

SYMBOLS = {"hindsight_coeff": "λ (hindsight_coeff)", "clamp_alpha": "α (clamp_alpha)"}
"""The settings that the map shows where they are searched, as the paper calls them."""
COLOUR_MAP = "viridis"
MOST_CELLS = 12
"""Values of a setting up to which it makes rows or columns of cells."""

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


def _varied(points: Sequence[PointValue]) -> list[str]:
    """Settings that took several values, in alphabetical order."""
    names = sorted({name for parameters, _, _ in points for name in parameters})
    return [name for name in names if len({str(point[0].get(name)) for point in points}) > 1]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
