"""Confidence intervals and tests.

For one training seed: the Wilson interval of a rate, and a test and an interval for the difference of two paired rates. For
several training seeds: a two-level bootstrap over seeds and tasks, and a t-test over seeds, for means and paired differences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from trial_ray.files import Json

Z = NormalDist().inv_cdf(0.975)
"""Quantile of the normal distribution for a two-sided 95 % interval."""
RESAMPLES = 10_000
CHUNK = 1_000
"""Number of resamples per batch, which limits memory."""
POINTS = 100
"""Approximate number of points of a curve per batch, which limits memory."""


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """Return the 95 % Wilson score interval of a binomial proportion (Wilson, 1927), without continuity correction.

    Args:
        successes: number of successes, 0 to ``trials``.
        trials: number of trials; if 0, the interval is (0, 1).

    Returns:
        Lower and upper bound, both in [0, 1].
    """
    from scipy import stats

    if trials == 0:
        return 0.0, 1.0
    interval = stats.binomtest(successes, trials).proportion_ci(method="wilson")
    return float(interval.low), float(interval.high)


def task_interval(means: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of a mean over tasks; ``means`` has the mean of each task, in [0, 1].

    The interval is a bootstrap over tasks, or the Wilson interval if all values are 0 or all are 1.
    """
    return mean_interval(np.array([means]), successes=False)


def pass_at(successes: int, trials: int, k: int) -> float:
    """Return an unbiased estimate of the probability that at least one of ``k`` episodes succeeds (Chen et al., 2021, Eq. 1).

    Args:
        successes: number of the task's episodes that succeeded.
        trials: number of the task's episodes, at least ``k``.
        k: number of episodes, from 1 to ``trials``.
    """
    return 1.0 - math.comb(trials - successes, k) / math.comb(trials, k)


def mcnemar_exact(gained: int, lost: int) -> float:
    """Return the p-value of the two-sided exact McNemar test of the hypothesis that gained and lost tasks are equally likely.

    Args:
        gained: number of tasks solved only in the second of two evaluations.
        lost: number of tasks solved only in the first.

    Returns:
        The p-value; 1 if no task changed.
    """
    from scipy import stats

    return float(stats.binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0


def paired_difference_interval(gained: int, lost: int, pairs: int) -> tuple[float, float]:
    """Return the 95 % interval of the difference of two paired proportions: adjusted Wald (Bonett and Price, 2012).

    The method adds one to each discordant count and two to the number of pairs, which keeps the coverage close to nominal in
    small samples. The plain Wald interval has zero width if no task changes.

    Args:
        gained: number of pairs with a success only in the second evaluation.
        lost: number of pairs with a success only in the first evaluation.
        pairs: number of all pairs.
    """
    up, down = (gained + 1) / (pairs + 2), (lost + 1) / (pairs + 2)
    half = Z * math.sqrt((up + down - (up - down) ** 2) / (pairs + 2))
    return max(-1.0, up - down - half), min(1.0, up - down + half)


@dataclass(frozen=True)
class SeedInterval:
    """95 % interval of a mean by Student's t over the means of the training seeds, for a fixed set of tasks.

    A bootstrap interval over few seeds is too narrow; this interval is exact if the seeds' means are normally distributed.

    Attributes:
        low: lower bound.
        high: upper bound.
        p_value: two-sided p-value of the hypothesis that the mean is zero.
    """

    low: float
    high: float
    p_value: float


@dataclass(frozen=True)
class BootstrapInterval:
    """A mean with its 95 % percentile interval.

    Attributes:
        mean: mean over seeds and tasks.
        low: lower bound.
        high: upper bound.
        p_value: two-sided p-value of the hypothesis that the mean is zero: twice the smaller share of resampled means on
            either side of zero.
        seeds: number of resampled seeds; with one seed, the interval does not include differences between training runs.
        tasks: number of resampled tasks.
        over_seeds: interval by Student's t over the seeds; ``None`` for one seed.
    """

    mean: float
    low: float
    high: float
    p_value: float
    seeds: int
    tasks: int
    over_seeds: SeedInterval | None

    @property
    def stricter(self) -> tuple[SeedInterval | BootstrapInterval, str]:
        """The bootstrap or the t-test over the training seeds, whichever has the larger p-value, and the name of its method."""
        if self.over_seeds is None or self.over_seeds.p_value <= self.p_value:
            return self, f"bootstrap over {self.seeds} seeds and the tasks"
        return self.over_seeds, f"paired t-test over {self.seeds} seeds"


def mean_interval(values: np.ndarray, successes: bool) -> tuple[float, float]:
    """Return the 95 % interval of a mean over seeds and tasks.

    Successes have the Wilson interval over all episodes. Scores have the interval of :func:`bootstrap_mean`, or the Wilson
    interval if all scores are 0 or all are 1, because a bootstrap interval would then have zero width.

    Args:
        values: values in [0, 1], float ``[S, N]``, one row per training seed and one column per task.
        successes: True if the values are successes (0 or 1), False if they are scores.

    Raises:
        ValueError: ``values`` is rejected by :func:`bootstrap_mean`.
    """
    total = float(values.sum())
    if successes or total in (0.0, float(values.size)):
        return wilson_interval(int(total), values.size)
    interval = bootstrap_mean(values)
    return interval.low, interval.high


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for multiple comparisons with Holm's method (1979), which controls the family-wise error rate.

    Args:
        p_values: p-values of all comparisons in the family.
    """
    order = np.argsort(p_values)
    adjusted = np.empty(len(p_values))
    factors = np.arange(len(p_values), 0, -1)
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(factors * np.asarray(p_values)[order]))
    return adjusted.tolist()


def add_adjusted(differences: Sequence[Json]) -> None:
    """Add ``p_holm``, the p-value adjusted by :func:`holm`, to each comparison of a family: to its bootstrap and to its t-test.

    Args:
        differences: fields of each comparison's :class:`BootstrapInterval`; changed in place.
    """
    t_tests = [test["over_seeds"] for test in differences if test["over_seeds"] is not None]
    for family in (differences, t_tests):
        for test, adjusted in zip(family, holm([test["p_value"] for test in family]), strict=True):
            test["p_holm"] = adjusted


def half_width(values: Sequence[float] | np.ndarray) -> float:
    """Return half the width of the 95 % interval of a mean by Student's t.

    Args:
        values: values of at least two independent repetitions.
    """
    from scipy import stats

    return float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))


def differ(values: Sequence[float] | np.ndarray) -> bool:
    """Return True if values differ by more than rounding errors.

    Means that are mathematically equal can differ in their last bits if they were summed in different orders.
    """
    from scipy import stats

    return float(stats.sem(values)) > 1e-12 * max(1.0, abs(float(np.mean(values))))


def seed_interval(means: np.ndarray) -> SeedInterval | None:
    """Return the interval by Student's t over the means of the training seeds; ``None`` for a single seed.

    Args:
        means: float ``[S]``, one mean per training seed.

    Raises:
        ValueError: a mean is not finite.
    """
    from scipy import stats

    if not np.isfinite(means).all():
        raise ValueError(f"expected finite means of seeds, got {means}")
    if means.size < 2:
        return None
    if not differ(means):
        mean = float(means.mean())
        return SeedInterval(mean, mean, 1.0 if abs(mean) <= 1e-12 else 0.0)
    test = stats.ttest_1samp(means, 0.0)
    interval = test.confidence_interval()
    return SeedInterval(float(interval.low), float(interval.high), float(test.pvalue))


def bootstrap_mean(values: np.ndarray, resamples: int = RESAMPLES, seed: int = 0) -> BootstrapInterval:
    """Return a mean with its bootstrap interval over seeds and tasks.

    Seeds and tasks are resampled independently, each with replacement (the pigeonhole bootstrap, Owen, 2007), since the runs of
    all seeds play the same tasks. The interval covers the variation between runs and between tasks; it is conservative.

    Args:
        values: float ``[S, N]``, one row per training seed and one column per task; differences for a paired comparison.
        resamples: number of resamples.
        seed: seed of the resampling.

    Raises:
        ValueError: ``values`` is empty, not two-dimensional, or not finite.
    """
    values = np.asarray(values, np.float64)
    if values.ndim != 2 or not values.size or not np.isfinite(values).all():
        raise ValueError(f"Expected finite values of shape [seeds, tasks], got shape {values.shape}.")
    generator = np.random.default_rng(seed)
    num_seeds, num_tasks = values.shape
    means = []
    for start in range(0, resamples, CHUNK):
        count = min(CHUNK, resamples - start)
        by_seed, by_task = (
            generator.multinomial(number, np.full(number, 1 / number), size=count) for number in values.shape
        )
        means.append(((by_seed @ values) * by_task).sum(1) / values.size)
    drawn = np.concatenate(means)
    # A resampled mean that is zero up to rounding errors counts on both sides of zero.
    tolerance = 1e-9 * max(1.0, float(np.abs(values).max()))
    tail = min(np.mean(drawn <= tolerance), np.mean(drawn >= -tolerance))
    low, high = np.quantile(drawn, [0.025, 0.975])
    p_value = min(1.0, max(2 * float(tail), 1 / resamples))
    return BootstrapInterval(
        float(values.mean()), float(low), float(high), p_value, num_seeds, num_tasks, seed_interval(values.mean(1))
    )


def bootstrap_curve(values: np.ndarray) -> np.ndarray:
    """Return the 95 % percentile interval of the mean over seeds at each point of a curve; it is too narrow for few seeds.

    The same resampled seeds are used for every point.

    Args:
        values: float ``[S, P]``, one row per training seed and one column per point.

    Returns:
        Float ``[P, 2]``, lower and upper bounds.
    """
    num_seeds = len(values)
    by_seed = np.random.default_rng(0).multinomial(num_seeds, np.full(num_seeds, 1 / num_seeds), size=RESAMPLES)
    # Blocks of points limit memory.
    blocks = np.array_split(values, 1 + values.shape[1] // POINTS, axis=1)
    return np.concatenate([np.quantile(by_seed @ block / num_seeds, [0.025, 0.975], axis=0).T for block in blocks])
