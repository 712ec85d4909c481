"""Equality of numbers and tensors up to rounding; environments' processes use it, so it does not import torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, overload

if TYPE_CHECKING:
    from torch import Tensor

ROUNDING = 1e-6
"""Relative error that a reward may have: float32, which many environments use, keeps seven digits, and sums of the same
rewards in another order differ in the last digit."""


@overload
def equal_up_to_rounding(first: float, second: float) -> bool: ...
@overload
def equal_up_to_rounding(first: Tensor, second: Tensor) -> Tensor: ...
def equal_up_to_rounding(first: Any, second: Any) -> Any:
    """Return whether two rewards, such as the smallest and the largest of a group, are equal: numbers, or tensors of one shape.

    NaN and infinities are not equal to anything.
    """
    distance = abs(second - first)
    return (distance <= ROUNDING * abs(first) + ROUNDING * abs(second)) & (distance < math.inf)
