"""What a sweep leaves in its folder: tables, pictures, and the best configuration as an experiment file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trial_ray.runs.config_record import write_experiment
from trial_ray.sweeps.file import SweepFile, at_point, dotted
from trial_ray.sweeps.result import SweepResult

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
            yield f"no {part}: {(str(error).strip() or type(error).__name__).splitlines()[0]}"


def _pictures(result: SweepResult, folder: Path) -> Iterator[str]:
    from trial_ray.reports.sweep_plots import plot_map, plot_parallel

    points = [(each.parameters, each.mean, each.half_width) for each in result.points() if each.mean is not None]
    drawn = {
        "map": plot_map(points, result.metric, folder / "map"),
        "parallel coordinates": plot_parallel(points, result.metric, folder / "parallel"),
    }
    for name, files in drawn.items():
        if files:
            yield f"{name}: {files[0]} (and {files[1].suffix})"


def _best(file: SweepFile, result: SweepResult, folder: Path) -> Iterator[str]:
    best = result.best()
    if best is None:
        yield f"no {BEST}: no trial that did not fail has a finite {result.metric}"
        return
    values = {path: best.parameters[dotted(path)] for path in file.searched}
    chosen = ", ".join(f"{name} = {best.parameters[name]!r}" for name in result.names)
    point = result.points()[0]
    lacks = f"; no point is complete, this one lacks {point.lacks}" if point.lacks else ""
    summary = (
        f"The best of {len(result.points())} points of {file.path.name}: {chosen}; {result.metric} {point}{lacks}."
    )
    config = at_point(file.config, values)
    chosen_names = [path[0] for path in values]
    write_experiment(folder / BEST, config, file.stop, summary, file.path, chosen_names, file.overrides)
    yield f"best: {chosen}{lacks}; trial-ray train {folder / BEST}"
