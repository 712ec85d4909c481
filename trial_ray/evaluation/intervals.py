"""How sure a rate is: the Wilson interval, and test and interval of the difference of two paired rates."""

from __future__ import annotations

import math
from statistics import NormalDist


def wilson_interval(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson score interval of a binomial proportion (Wilson, 1927), without continuity correction.

    Args:
        successes: number of successes, 0 to ``trials``.
        trials: number of trials; with none at all the interval is (0, 1).
        confidence: coverage of the two-sided interval, in (0, 1).

    Returns:
        Lower and upper bound, both in [0, 1].

    Raises:
        ValueError: a count is negative, ``successes > trials``, or ``confidence`` is outside (0, 1).
    """
    if not 0 <= successes <= trials:
        raise ValueError(f"successes must lie between 0 and trials; found {successes} of {trials}")
    z = _quantile(confidence)
    if trials == 0:
        return 0.0, 1.0
    rate = successes / trials
    denominator = 1 + z * z / trials
    centre = (rate + z * z / (2 * trials)) / denominator
    half = z / denominator * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials))
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == trials else min(1.0, centre + half)
    return low, high


def mcnemar_exact(gained: int, lost: int) -> float:
    """Two-sided exact McNemar test: are ``gained`` and ``lost`` tasks two halves of a fair coin's flips?

    Args:
        gained: tasks solved only afterwards.
        lost: tasks solved only before.

    Returns:
        The p-value; 1 when no task changed.
    """
    if gained < 0 or lost < 0:
        raise ValueError(f"counts must not be negative; found gained={gained}, lost={lost}")
    flips = gained + lost
    tail = sum(math.comb(flips, k) for k in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / 2**flips)


def paired_difference_interval(gained: int, lost: int, pairs: int, confidence: float = 0.95) -> tuple[float, float]:
    """Interval of the difference of two paired proportions: adjusted Wald (Bonett and Price, 2012).

    It adds one to each discordant count and two to the pairs, which keeps its coverage near nominal in small samples,
    where the plain Wald interval collapses to a point when no task changes.
    """
    if min(gained, lost) < 0 or gained + lost > pairs:
        raise ValueError(f"gained + lost must lie between 0 and pairs; found {gained} + {lost} of {pairs}")
    z = _quantile(confidence)
    up, down = (gained + 1) / (pairs + 2), (lost + 1) / (pairs + 2)
    half = z * math.sqrt((up + down - (up - down) ** 2) / (pairs + 2))
    return max(-1.0, up - down - half), min(1.0, up - down + half)


def _quantile(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1; found {confidence}")
    return NormalDist().inv_cdf(0.5 + confidence / 2)
