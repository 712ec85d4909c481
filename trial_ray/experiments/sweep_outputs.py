"""What a sweep leaves in its folder: tables, pictures, and the best configuration as an experiment file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trial_ray.errors import MissingDependencyError
from trial_ray.experiments.experiment_writer import write_experiment
from trial_ray.experiments.search_space import at_point, dotted
from trial_ray.experiments.sweep_file import SweepFile
from trial_ray.experiments.sweep_result import SweepResult

BEST = "best.py"


def write_outputs(file: SweepFile, result: SweepResult, folder: Path) -> Iterator[str]:
    """Write everything; yields a line on each thing that a user would look for.

    Args:
        file: what was searched.
        result: what came out.
        folder: of the sweep.
    """
    result.save(folder)
    yield f"table: {folder / 'results.csv'}"
    yield from _pictures(result, folder)
    yield from _best(file, result, folder)


def _pictures(result: SweepResult, folder: Path) -> Iterator[str]:
    from trial_ray.reports.sweep_plots import plot_map, plot_parallel

    points = [(each.parameters, each.mean, each.half_width) for each in result.points() if each.mean is not None]
    try:
        drawn = {
            "map": plot_map(points, result.metric, folder / "map"),
            "parallel coordinates": plot_parallel(points, result.metric, folder / "parallel"),
        }
    except MissingDependencyError as error:
        yield f"no pictures: {error}"
        return
    for name, files in drawn.items():
        if files:
            yield f"{name}: {files[0]} (and {files[1].suffix})"


def _best(file: SweepFile, result: SweepResult, folder: Path) -> Iterator[str]:
    best = result.best()
    if best is None:
        return
    values = {path: best.parameters[dotted(path)] for path in file.searched}
    chosen = ", ".join(f"{name} = {best.parameters[name]!r}" for name in result.names)
    point = result.points()[0]
    summary = f"The best of {len(result.points())} points of {file.path.name}: {chosen}; {result.metric} {point}."
    config = at_point(file.config, values)
    write_experiment(folder / BEST, config, file.stop, summary, file.path, [path[0] for path in values])
    yield f"best: {chosen}; trial-ray train {folder / BEST}"
