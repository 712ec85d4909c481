"""File of a run's metrics, ``metrics.jsonl``, with one JSON object per iteration, and checks of metric names."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trial_ray.algorithms.methods import method_names, method_of
from trial_ray.config.declare import is_finite
from trial_ray.errors import ConfigError
from trial_ray.files import Numbers, Record, checked_content, read_lines, write_text
from trial_ray.metrics import EVALUATION, METRICS, table_key

if TYPE_CHECKING:
    from trial_ray.algorithms.grpo import GRPOConfig


def flatten(result: Record) -> Numbers:
    """Return the finite numbers of an algorithm's nested result by ``/``-joined keys; other values are omitted."""
    flat: Numbers = {}
    for name, value in _leaves(result):
        try:
            number = float(value)
        except (TypeError, ValueError):
            continue
        if math.isfinite(number):
            flat[name] = int(number) if isinstance(value, int) else number
    return flat


def _leaves(result: Record, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a nested result, except strings and the config, under ``/``-joined keys."""
    for key, value in result.items():
        if isinstance(value, Mapping):
            if key != "config":
                yield from _leaves(value, f"{prefix}{key}/")
        elif not isinstance(value, str | bytes):
            yield f"{prefix}{key}", value


def drop_after(file: Path, iteration: int) -> None:
    """Remove the lines after an iteration, and lines that a crash truncated, from a ``metrics.jsonl``."""
    write_text(file, "".join(line + "\n" for number, line, _ in _parse(read_lines(file)) if number <= iteration))


def recorded_metrics(file: Path, iteration: int) -> Numbers:
    """Return an iteration's metrics from a ``metrics.jsonl``; empty if the file or the iteration is missing."""
    return {number: metrics for number, _, metrics in _read(file)}.get(iteration, {})


def recorded_iterations(file: Path) -> list[int]:
    """Return the iterations in a ``metrics.jsonl``; empty if there is no file."""
    return [number for number, _, _ in _read(file)]


MAX_MAGNITUDE = 1e150
"""Maximum magnitude of a value that is read from a file, so that means and intervals of values are finite."""


def read_metrics(file: Path) -> tuple[list[Numbers], int]:
    """Return the iterations of a ``metrics.jsonl`` in order, and the number of unreadable lines (truncated by a kill, for example).

    If an iteration occurs twice, the later line is used. Values that are not numbers, or exceed :data:`MAX_MAGNITUDE`, are omitted.

    Raises:
        CheckpointError: the file is missing.
    """
    with checked_content(file):
        lines = read_lines(file)
    parsed = list(_parse(lines))
    by_iteration = {
        iteration: {key: value for key, value in metrics.items() if is_finite(value) and abs(value) <= MAX_MAGNITUDE}
        for iteration, _, metrics in parsed
    }
    return [by_iteration[iteration] for iteration in sorted(by_iteration)], len(lines) - len(parsed)


def _read(file: Path) -> Iterator[tuple[int, str, Numbers]]:
    return _parse(read_lines(file) if file.is_file() else [])


def _parse(lines: Sequence[str]) -> Iterator[tuple[int, str, Numbers]]:
    """Yield iteration, text and values of every line that can be parsed."""
    for line in lines:
        try:
            metrics = json.loads(line)
            number = metrics["iteration"]
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        if type(number) is int:
            yield number, line, metrics


MIN_SIMILARITY = 0.8
"""Minimum similarity (0 to 1) of two parts of ``/``-joined metric names for one to count as a misspelling of the other."""


def check_metric(name: str, role: str, config: GRPOConfig) -> None:
    """Reject a misspelled metric name before a run starts; other unknown names are accepted, since a method may log them.

    Args:
        name: ``/``-joined key of a result.
        role: what the name is used for, for the message, such as ``a key of stop``.
        config: config that logs the metric.

    Raises:
        ConfigError: the name is a misspelling of a known name, or is an evaluation metric and ``config`` sets no evaluation
            during training.
    """
    if name.startswith(EVALUATION) and not (config.evaluation_interval and config.evaluation_split):
        raise ConfigError(
            f"{role} is {name!r}, but there is no evaluation while training: set .evaluation(evaluation_split=...) and "
            ".evaluation(evaluation_interval=1)."
        )
    if table_key(name) in METRICS or (name.startswith("learners/") and method_of(config) not in method_names()):
        return
    if nearest := [known for known in METRICS if _is_misspelling(name, known)]:
        raise ConfigError(f"{role} is {name!r}, which is not logged. Did you mean {_either(nearest)}?")


def check_reported(name: str, role: str, result: Record) -> None:
    """Reject a name that is missing in a trial's first result, except names of evaluation metrics, which may come later.

    Args:
        name: ``/``-joined key.
        role: what the name is used for, for the message.
        result: the nested dict that the algorithm's ``train()`` returned.

    Raises:
        ConfigError: the name is missing; the message names the nearest keys of the result.
    """
    keys = {key for key, _ in _leaves(result)}
    if name in keys or name.startswith(EVALUATION):
        return
    last = name.rpartition("/")[2]
    nearest = [key for key in sorted(keys) if key.rpartition("/")[2] == last]
    nearest += [key for key in difflib.get_close_matches(name, sorted(keys), n=3, cutoff=0.6) if key not in nearest]
    hint = f" Did you mean {_either(nearest[:3])}?" if nearest else " docs/metrics.md lists what is logged."
    raise ConfigError(f"{role} is {name!r}, which is not in a trial's result.{hint}")


def _is_misspelling(name: str, known: str) -> bool:
    """Return True if both names have the same number of parts, each similar to its counterpart."""
    parts, others = name.split("/"), known.split("/")
    return len(parts) == len(others) and all(
        part == other or difflib.SequenceMatcher(None, part, other).ratio() >= MIN_SIMILARITY
        for part, other in zip(parts, others, strict=True)
    )


def _either(names: list[str]) -> str:
    return " or ".join(repr(name) for name in names)
