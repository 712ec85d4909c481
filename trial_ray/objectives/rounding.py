"""Equality up to rounding, of numbers and tensors; environments' processes use it, so it does not import torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, overload

if TYPE_CHECKING:
    from torch import Tensor

ROUNDING = 1e-6
"""Share of its size by which a reward may be off: float32, in which many environments count, keeps seven digits, and sums of
the same rewards in another order differ in the last of them."""


@overload
def equal_up_to_rounding(one: float, other: float) -> bool: ...
@overload
def equal_up_to_rounding(one: Tensor, other: Tensor) -> Tensor: ...
def equal_up_to_rounding(one: Any, other: Any) -> Any:
    """Whether two rewards, such as the smallest and the largest of a group, are the same: numbers, or tensors of one shape.

    NaN and infinities are equal to nothing.
    """
    distance = abs(other - one)
    return (distance <= ROUNDING * abs(one) + ROUNDING * abs(other)) & (distance < math.inf)
