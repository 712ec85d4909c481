"""Means of logged scalars over microbatches of unequal size, exact for any number of learners."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping

import torch

Sums = dict[tuple[str, str], tuple[float, float]]
"""By prefix and name, the weighted sum and the sum of weights."""


class WeightedMeans:
    """Adds up scalars with the weight of the piece of work that is under way; 0 adds nothing."""

    def __init__(self) -> None:
        self._sums: Sums = {}
        self._weight = 0.0

    @contextlib.contextmanager
    def weighing(self, weight: float) -> Iterator[None]:
        """Give what is added inside this weight."""
        previous, self._weight = self._weight, weight
        try:
            yield
        finally:
            self._weight = previous

    def add(self, prefix: str, values: Mapping[str, torch.Tensor]) -> None:
        """Add scalars, each of shape ()."""
        if self._weight:
            for name, value in values.items():
                total, weight = self._sums.get((prefix, name), (0.0, 0.0))
                self._sums[prefix, name] = total + self._weight * value.detach().item(), weight + self._weight

    def take(self) -> Sums:
        """The sums so far; what follows begins at nothing."""
        sums, self._sums = self._sums, {}
        return sums


def means(sums: Iterable[Sums]) -> dict[tuple[str, str], float]:
    """The means of what several learners have added up."""
    totals: Sums = {}
    for each in sums:
        for key, (total, weight) in each.items():
            before = totals.get(key, (0.0, 0.0))
            totals[key] = before[0] + total, before[1] + weight
    return {key: total / weight for key, (total, weight) in totals.items()}
