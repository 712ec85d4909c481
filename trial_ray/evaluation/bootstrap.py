"""Two-level bootstrap over training seeds and tasks, for means and for paired differences."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

RESAMPLES = 10_000
CHUNK = 1_000
"""Resamples at a time: their counts over seeds and tasks are held in memory."""


@dataclass(frozen=True, slots=True)
class BootstrapInterval:
    """A mean with its 95 % percentile interval.

    Attributes:
        mean: over seeds and tasks.
        low: lower bound.
        high: upper bound.
        p_value: two-sided, of the mean being zero: twice the smaller share of resampled means on either side.
        seeds: seeds resampled; with one, the interval knows nothing of how training runs differ.
        tasks: tasks resampled.
    """

    mean: float
    low: float
    high: float
    p_value: float
    seeds: int
    tasks: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def bootstrap_mean(values: np.ndarray, resamples: int = RESAMPLES, seed: int = 0) -> BootstrapInterval:
    """Resample seeds and tasks, each with replacement and independently (the pigeonhole bootstrap, Owen, 2007).

    All runs play the same tasks, so a value belongs to a seed and to a task at once. The interval covers both: another
    training run, and other tasks of the same kind. It errs on the wide side.

    Args:
        values: float ``[S, N]``, one row a training seed, one column a task; for a paired comparison, differences.
        resamples: how many.
        seed: of the resampling.

    Raises:
        ValueError: ``values`` is empty, not two-dimensional, or not finite.
    """
    values = np.asarray(values, np.float64)
    if values.ndim != 2 or not values.size or not np.isfinite(values).all():
        raise ValueError(f"values must be finite and of shape [seeds, tasks]; found shape {values.shape}")
    generator = np.random.default_rng(seed)
    num_seeds, num_tasks = values.shape
    means = []
    for start in range(0, resamples, CHUNK):
        count = min(CHUNK, resamples - start)
        by_seed = generator.multinomial(num_seeds, np.full(num_seeds, 1 / num_seeds), size=count)
        by_task = generator.multinomial(num_tasks, np.full(num_tasks, 1 / num_tasks), size=count)
        means.append(((by_seed @ values) * by_task).sum(1) / values.size)
    drawn = np.concatenate(means)
    # Sums of the same numbers in another order differ in the last bits; a tie with zero must count on both sides.
    tolerance = 1e-9 * max(1.0, float(np.abs(values).max()))
    tail = min(np.mean(drawn <= tolerance), np.mean(drawn >= -tolerance))
    low, high = np.quantile(drawn, [0.025, 0.975])
    p_value = min(1.0, max(2 * float(tail), 1 / resamples))
    return BootstrapInterval(float(values.mean()), float(low), float(high), p_value, num_seeds, num_tasks)


def paired_bootstrap(
    first: np.ndarray, second: np.ndarray, resamples: int = RESAMPLES, seed: int = 0
) -> BootstrapInterval:
    """:func:`bootstrap_mean` of ``second - first``, both ``[S, N]`` with the same seeds and tasks in the same order."""
    if np.shape(first) != np.shape(second):
        raise ValueError(f"both must have one shape [seeds, tasks]; found {np.shape(first)} and {np.shape(second)}")
    return bootstrap_mean(np.asarray(second, np.float64) - np.asarray(first, np.float64), resamples, seed)
