"""Output of a sweep: tables, pictures, and the best configuration as an experiment file."""

from __future__ import annotations

import pprint
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trial_ray.algorithms.methods import method_of
from trial_ray.errors import first_line
from trial_ray.files import write_text
from trial_ray.runs.config_record import DERIVED, is_json
from trial_ray.runs.overrides import settable_names
from trial_ray.sweeps.file import SweepFile, at_point, dotted
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
