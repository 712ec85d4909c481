"""Quantiles of a stream of magnitudes, for tints that mean the same in every trajectory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_EDGES = np.geomspace(1e-6, 1e3, 901)


class Scale:
    """A histogram of absolute values, in steps of about 2 %."""

    def __init__(self) -> None:
        self._counts = np.zeros(len(_EDGES) + 1, np.int64)

    def add(self, values: Sequence[float] | np.ndarray) -> None:
        """Count values; those that are not finite are left out."""
        magnitudes = np.abs(np.asarray(values, np.float64))
        magnitudes = magnitudes[np.isfinite(magnitudes)]
        self._counts += np.bincount(np.searchsorted(_EDGES, magnitudes), minlength=len(self._counts))

    def quantile(self, share: float) -> float | None:
        """The magnitude that ``share`` of the values do not exceed; ``None`` without values."""
        total = int(self._counts.sum())
        if not total:
            return None
        bucket = int(np.searchsorted(np.cumsum(self._counts), share * total))
        return float(np.round(_EDGES[min(bucket, len(_EDGES) - 1)], 6))
