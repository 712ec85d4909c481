"""Outputs of a sweep: tables, a map of the metric over two settings, and the best configuration as an experiment file."""

from __future__ import annotations

import math
import pprint
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trial_ray.algorithms.config import plain
from trial_ray.algorithms.methods import method_of
from trial_ray.config.declare import is_finite
from trial_ray.errors import ConfigError, first_line
from trial_ray.files import Record, content_key, examples_folder, write_text
from trial_ray.reports.plots import drawing, picture_files
from trial_ray.runs.config_record import is_json
from trial_ray.runs.experiment import experiment_file
from trial_ray.sweeps.plan import SweepPlan, load_plan
from trial_ray.sweeps.results import POINT_COLUMNS, SweepResult

if TYPE_CHECKING:
    import pandas

BEST = "best.py"
WIDTH = 120


def write_outputs(plan: SweepPlan, result: SweepResult, folder: Path) -> Iterator[str]:
    """Write all outputs of a sweep and yield a message for each of them.

    Args:
        plan: plan of the sweep.
        result: results of the sweep.
        folder: folder of the sweep.
    """
    result.save(folder)
    yield f"table: {folder / 'results.csv'}"
    yield from messages_of({"map": _map(result, folder), BEST: _best(plan, result, folder)})


def messages_of(parts: Mapping[str, Iterator[str]]) -> Iterator[str]:
    """Yield the messages of several outputs; if one fails, its error becomes a message, and the others continue."""
    for name, messages in parts.items():
        try:
            yield from messages
        except Exception as error:
            yield f"no {name}: {first_line(error)}"


def _best(plan: SweepPlan, result: SweepResult, folder: Path) -> Iterator[str]:
    best = result.best()
    if best is None:
        yield f"no {BEST}: no successful trial has a finite {result.metric}"
        return
    points = result.points()
    mean, half_width, trials, _, lacks, _ = points.loc[0, [*POINT_COLUMNS]]
    interval = "" if math.isnan(half_width) else f" ± {half_width:.2g} (n={trials})"
    chosen = ", ".join(f"{name} = {best.parameters[name]!r}" for name in result.names)
    incomplete = f"; no point is complete, this point lacks {lacks}" if lacks else ""
    summary = f"The best of {len(points)} points of {plan.path.name}: {chosen}; {result.metric} {mean:.4g}{interval}"
    write_best(plan, best.parameters, f"{summary}{incomplete}.", folder / BEST)
    yield f"best: {chosen}{incomplete}; trial-ray train {folder / BEST}"


def write_best(plan: SweepPlan, parameters: Record, summary: str, path: Path) -> None:
    """Write an experiment file with the sweep's config at one point of the search, and the sweep's overrides and ``stop``.

    The written file loads the sweep file again, and raises an error if the sweep file no longer defines the sweep that was run.

    Args:
        plan: plan of the sweep file, which the written file loads.
        parameters: values of the point, by dotted path.
        summary: docstring of the written file.
        path: path of the written file.

    Raises:
        ConfigError: a value of the point cannot be written as Python.
    """
    chosen = {name: parameters[name] for name in plan.spaces}
    if objects := [name for name, value in chosen.items() if not is_json(plain(value))]:
        raise ConfigError(f"the value of {objects[0]} is an object of the sweep file: {chosen[objects[0]]!r:.200}")
    docstring = textwrap.fill(summary.replace("\\", "\\\\").replace('"', "'"), WIDTH - 6)
    path_or_name, examples = plan.path.resolve(), examples_folder().resolve()
    if path_or_name.is_relative_to(examples):  # Write only the example's name: its path depends on the installation.
        path_or_name = path_or_name.relative_to(examples).with_suffix("")
    key = content_key(plan.description)
    # method_of() returns an absolute path if a file defines the method.
    method = None if plan.method is None else method_of(plan.config)
    text = f"""from trial_ray.sweeps.outputs import load_unchanged
from trial_ray.sweeps.space import at_point

plan = load_unchanged({str(path_or_name)!r}, {plan.iterations}, {_literal(list(plan.overrides))}, {key!r}, {method!r})
config = at_point(plan.config, {_literal(plain(chosen))})
stop = {_literal(plan.stop)}
"""
    numbers = "from math import inf\n\n" if re.search(r"\binf\b", text) else ""
    write_text(path, f'"""{docstring}"""\n\n{numbers}{text}')


def load_unchanged(name: str, iterations: int | None, overrides: list[str], key: str, method: str | None) -> SweepPlan:
    """Load the plan of an earlier sweep; files that :func:`write_best` writes call this function.

    Args:
        name: path of the file, or its name among the tuned examples.
        iterations: as in :func:`trial_ray.sweeps.plan.load_plan`.
        overrides: as in :func:`trial_ray.sweeps.plan.load_plan`.
        key: digest of the plan's description at the time of the sweep.
        method: as in :func:`trial_ray.sweeps.plan.load_plan`.

    Raises:
        ConfigError: the file no longer defines the same sweep.
    """
    plan = load_plan(experiment_file(name), iterations, overrides, method)
    if content_key(plan.description) != key:
        raise ConfigError(
            f"{plan.path} defines another sweep than the sweep whose best point this file trains. Restore {plan.path.name}, or "
            "give the path that it had then."
        )
    return plan


def _literal(value: Any) -> str:
    """Return plain values as Python code."""
    return pprint.pformat(value, width=WIDTH - 30, sort_dicts=False)


# -- map ---------------------------------------------------------------------------------------------------------------

SYMBOLS = {"hindsight_coeff": "λ (hindsight_coeff)", "clamp_alpha": "α (clamp_alpha)"}
"""Settings that :func:`_map` prefers as axes if they are searched, with axis labels in the TRIAL paper's notation."""
COLOUR_MAP = "viridis"
MAX_CELLS = 12
"""Maximum number of rows, and of columns, of the grid that :func:`plot_map` plots."""


def _map(result: SweepResult, folder: Path) -> Iterator[str]:
    if files := plot_map(result.points(), result.metric, folder / "map"):
        yield f"map: {files[0]} (and {files[1].suffix})"


def plot_map(points: pandas.DataFrame, metric: str, path: Path) -> list[Path]:
    """Plot a metric over two settings that form a grid.

    Each cell shows the mean ± half of the 95 % interval over seeds. If more than two settings were searched, a cell with
    several points (combinations of values) shows the mean of the points without an interval.

    Args:
        points: points as returned by :meth:`SweepResult.points`.
        metric: result key of the values.
        path: path of the files, without suffix.

    Returns:
        The written files; empty if fewer than two numeric settings took several values, or if the grid of the two settings has
        more than :data:`MAX_CELLS` rows or columns, or values in fewer than half of its cells.
    """
    points = points[points["mean"].notna()]
    settings = points.drop(columns=[*POINT_COLUMNS])
    numeric = [name for name in settings if settings[name].map(is_finite).all() and settings[name].nunique() > 1]
    if len(numeric) < 2:
        return []
    across, down = [*filter(numeric.__contains__, SYMBOLS), *(name for name in numeric if name not in SYMBOLS)][:2]
    cells = points.groupby([down, across])
    means = cells["mean"].mean().unstack()
    if max(means.shape) > MAX_CELLS or means.count().sum() * 2 < means.size:
        return []
    half_widths = cells["half_width"].agg(lambda values: values.iloc[0] if len(values) == 1 else math.nan).unstack()
    files, (rows, columns) = picture_files(path.parent, path.name), means.shape
    with drawing(files, (max(4.0, 2.2 + 1.25 * columns), max(2.6, 1.6 + 0.75 * rows))) as (figure, axis):
        figure.colorbar(_draw_cells(axis, means, half_widths), ax=axis, label=metric.rpartition("/")[2])
        axis.set_xlabel(SYMBOLS.get(across, across))
        axis.set_ylabel(SYMBOLS.get(down, down))
        if points["half_width"].notna().any():
            axis.set_title("mean ± 95 % interval over seeds")
    return files


def _draw_cells(axis: Any, means: pandas.DataFrame, half_widths: pandas.DataFrame) -> Any:
    image = axis.imshow(means.to_numpy(), origin="lower", aspect="auto", cmap=COLOUR_MAP)
    for (row, column), mean in np.ndenumerate(means.to_numpy()):
        if not math.isnan(mean):
            half_width = half_widths.iloc[row, column]
            text = f"{mean:.3g}" + ("" if math.isnan(half_width) else f"\n± {half_width:.2g}")
            colour = "white" if image.norm(mean) < 0.6 else "black"
            axis.text(column, row, text, ha="center", va="center", fontsize=9, color=colour)
    axis.set_xticks(range(len(means.columns)), [f"{value:g}" for value in means.columns])
    axis.set_yticks(range(len(means)), [f"{value:g}" for value in means.index])
    return image
