"""Drops the records of the iterations that a resumed run makes again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from trial_ray.experiments.metric_lines import kept_lines
from trial_ray.experiments.run_evaluations import read_name
from trial_ray.files import write_text
from trial_ray.rollout.partitions import partitions


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
