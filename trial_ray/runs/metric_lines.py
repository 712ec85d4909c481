"""Lines of metrics on disk, and what a resumed run takes back of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from trial_ray.files import read_lines, write_text
from trial_ray.rollout.partitions import partitions
from trial_ray.runs.evaluations import read_name


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


def drop_later_records(
    iteration: int, *, recordings: Sequence[Path], evaluations: Path, metrics: Path, summary: Path
) -> None:
    """Remove what a run recorded after an iteration.

    Args:
        iteration: after which the run continues.
        recordings: folders of Parquet files, one folder an iteration in each.
        evaluations: folder of evaluations.
        metrics: file of metrics.
        summary: file that says how the run ended.
    """
    for root in recordings:
        for number, folder in partitions(root).items():
            if number > iteration:
                shutil.rmtree(folder)
    for path in evaluations.glob("*.json"):
        if (named := read_name(path)) is not None and named[1] > iteration:
            path.unlink()
    if metrics.exists():
        write_text(metrics, "".join(kept_lines(metrics, iteration)))
    if _summarised_iteration(summary) > iteration:
        summary.unlink()


def _summarised_iteration(summary: Path) -> int:
    try:
        return int(json.loads(summary.read_text(encoding="utf-8"))["iterations"])
    except (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError):
        return 0
