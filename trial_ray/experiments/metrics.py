"""An iteration's metrics, flat: a line of ``metrics.jsonl`` and a point on every TensorBoard curve."""

from __future__ import annotations

import json
import math
from typing import Any

from trial_ray.experiments.run_folder import RunFolder


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

    ``after_iteration`` is the iteration that training continues from, so that TensorBoard drops later ones; the run folder has
    dropped their lines (``RunFolder.drop_records_after``).
    """

    def __init__(self, folder: RunFolder, after_iteration: int = 0) -> None:
        from tensorboardX import SummaryWriter

        self._lines = open(folder.metrics, "a", encoding="utf-8")  # noqa: SIM115  closed by close()
        self._events = SummaryWriter(str(folder.tensorboard), purge_step=after_iteration + 1)

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
