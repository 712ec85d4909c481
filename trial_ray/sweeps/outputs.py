"""What a sweep leaves in its folder: tables, pictures, and the best configuration as an experiment file."""

from __future__ import annotations

import inspect
import pprint
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trial_ray.algorithms.methods import method_names, method_of
from trial_ray.config.declare import fields_of, sections_of
from trial_ray.errors import first_line
from trial_ray.files import write_text
from trial_ray.runs.config_record import is_json
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


FIRST_SECTIONS = ("environment", "policy", "training")
"""How experiment files begin; the other sections follow by name."""
DERIVED = frozenset({"algo_class", "env_specs", "policies"})
"""What constructor, sections and validation set by themselves."""
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
    settings = {name: getattr(config, name) for name in sorted(set(chosen))}
    # load_experiment finds modules beside the file.
    return [
        "from trial_ray.runs.experiment import load_experiment",
        "from trial_ray.runs.overrides import apply_overrides",
        "",
        f"source = load_experiment({literal(str(source.resolve()))}).config",
        f"config = apply_overrides(source, {literal(list(overrides))})",
        f"config.update_from_dict({literal(settings)})",
    ]


def _whole_config(config: GRPOConfig) -> list[str]:
    sections, rest = _by_section(config)
    if method_of(config) in method_names():
        made = [f"from {type(config).__module__} import {type(config).__name__}", ""]
        made += ["config = (", f"    {type(config).__name__}()"]
    else:
        made = ["from trial_ray.algorithms.methods import new_config", ""]
        made += ["config = (", f"    new_config({literal(method_of(config))})"]
    for name, settings in sections.items():
        made.append(f"    .{name}(")
        made += [f"        {keyword}={literal(value, 8)}," for keyword, value in settings.items()]
        made.append("    )")
    # Settings of RLlib's that no section takes.
    return [*made, ")", *([f"config.update_from_dict({literal(rest)})"] if rest else [])]


def _has_objects(config: GRPOConfig) -> bool:
    """Whether a setting that differs from its default cannot be written down."""
    defaults = vars(type(config)())
    return any(
        not is_json(value) and repr(value) != repr(defaults[name])
        for name, value in vars(config).items()
        if not name.startswith("_") and name not in DERIVED and name in defaults
    )


def _by_section(config: GRPOConfig) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Keywords of the fluent methods that set what differs from the defaults, and settings that none of them sets."""
    methods = _keywords(type(config))
    played = ("environments",) if config.environments else ("env", "env_config")
    chosen = {name: getattr(config, name) for name in played}
    # An environment brings defaults of its own.
    defaults = vars(type(config)().environment(**chosen))
    plain = [name for name in settable_names(vars(config)) if name in defaults and name not in DERIVED]
    changed = {
        name: value for name, value in vars(config).items() if name in plain and value != defaults[name]
    } | chosen
    found: dict[str, dict[str, Any]] = {}
    for name in changed.keys() & methods.keys():
        method, keyword = methods[name]
        found.setdefault(method, {})[keyword] = changed[name]
    order = {name: index for index, name in enumerate(FIRST_SECTIONS)}
    names = sorted(found, key=lambda name: (order.get(name, len(order)), name))
    rest = {name: value for name, value in changed.items() if name not in methods}
    return {name: dict(sorted(found[name].items())) for name in names}, rest


def _keywords(cls: type) -> dict[str, tuple[str, str]]:
    """Fluent method and keyword of every setting: of RLlib's sections, then of this package's."""
    from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

    methods: dict[str, tuple[str, str]] = {}
    for name, function in vars(AlgorithmConfig).items():
        if inspect.isfunction(function) and not name.startswith("_"):
            parameters = inspect.signature(function).parameters.values()
            methods |= {each.name: (name, each.name) for each in parameters if each.kind is each.KEYWORD_ONLY}
    methods |= {name: ("environment", name) for name in ("env", "env_config", "environments")}
    for section in sections_of(cls):
        methods |= {field.name: (section.name, keyword) for keyword, field in section.keywords(cls).items()}
    return {name: found for name, found in methods.items() if name in {*fields_of(cls), *vars(cls())}}


def literal(value: Any, indent: int = 0) -> str:
    """Plain values as Python; continued lines begin after ``indent`` spaces."""
    text = pprint.pformat(value, width=WIDTH - 30 - indent, sort_dicts=False)
    return text.replace("\n", "\n" + " " * indent)
