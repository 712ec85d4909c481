"""The lines of a run's ``metrics.jsonl``, one an iteration, while it is written; a crash may have cut the last one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from trial_ray.files import read_lines


def kept_lines(file: Path, iteration: int) -> list[str]:
    """Lines of a ``metrics.jsonl`` up to an iteration; later ones, and one that a crash cut, are left out."""
    return [line for number, line, _ in _whole_lines(file) if number <= iteration]


def recorded_metrics(file: Path, iteration: int) -> dict[str, float]:
    """An iteration's line of a ``metrics.jsonl``; empty where it has none."""
    found = [metrics for number, _, metrics in _whole_lines(file) if number == iteration] if file.is_file() else []
    return found[-1] if found else {}


def _whole_lines(file: Path) -> Iterator[tuple[int, str, dict[str, float]]]:
    """Iteration, text and values of every line that can be read."""
    for line in read_lines(file):
        try:
            metrics = json.loads(line)
            number = metrics["iteration"]
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        if type(number) is int:
            yield number, line + "\n", metrics
