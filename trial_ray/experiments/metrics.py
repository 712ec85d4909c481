"""An iteration's metrics, flat: a line of ``metrics.jsonl`` and a point on every TensorBoard curve."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from trial_ray.experiments.run_folder import RunFolder
from trial_ray.files import write_text


def flatten(result: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """The finite numbers of a nested result, under ``/``-joined keys; everything else is left out."""
    flat: dict[str, float] = {}
    for key, value in result.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            if key != "config":
                flat.update(flatten(value, f"{name}/"))
            continue
        try:
            number = float(value) if not isinstance(value, str | bytes) else math.nan
        except (TypeError, ValueError):
            continue
        if math.isfinite(number):
            flat[name] = int(number) if isinstance(value, int) else number
    return flat


class MetricWriters:
    """Writes every iteration's metrics to ``metrics.jsonl`` and to TensorBoard.

    ``after_iteration`` is the iteration that training continues from: lines of later ones, and a line that a crash cut,
    are dropped first, so that no iteration occurs twice.
    """

    def __init__(self, folder: RunFolder, after_iteration: int = 0) -> None:
        from tensorboardX import SummaryWriter

        if folder.metrics.exists():
            write_text(folder.metrics, "".join(_kept_lines(folder.metrics, after_iteration)))
        self._lines = open(folder.metrics, "a", encoding="utf-8")  # noqa: SIM115  closed by close()
        self._events = SummaryWriter(
            str(folder.tensorboard), purge_step=after_iteration + 1 if after_iteration else None
        )

    def write(self, iteration: int, result: dict[str, Any]) -> dict[str, float]:
        """Write one iteration; return its flat metrics."""
        flat = flatten(result)
        self._lines.write(json.dumps({"iteration": iteration, **flat}, allow_nan=False) + "\n")
        self._lines.flush()
        for name, value in flat.items():
            self._events.add_scalar(name, value, iteration)
        self._events.flush()
        return flat

    def close(self) -> None:
        """Close both files."""
        self._lines.close()
        self._events.close()

    def __enter__(self) -> MetricWriters:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _kept_lines(path: Path, after_iteration: int) -> list[str]:
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            iteration = json.loads(line)["iteration"]
        except (json.JSONDecodeError, KeyError, TypeError):
            continue
        if iteration <= after_iteration:
            kept.append(line + "\n")
    return kept
