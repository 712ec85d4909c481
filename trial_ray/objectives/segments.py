"""Sums over segments of flat tensors, and checks of arguments.

The checks raise a ``ValueError`` with the argument's name. ``like`` is the name and the tensor of another argument, which must have
the same length as the checked argument.
"""

from __future__ import annotations

import torch
from torch import Tensor

_FLOATS = (torch.float32, torch.float64)


def flat_floats(name: str, values: Tensor, like: tuple[str, Tensor] | None = None) -> Tensor:
    """Return ``values``; they must be flat float32 or float64 without NaN, and as long as the tensor ``like[1]``, if given."""
    if values.ndim != 1 or values.dtype not in _FLOATS:
        raise ValueError(f"{name} must be a flat float32 or float64 tensor, got {_describe(values)}.")
    _require_shape(name, values, like)
    if bool(values.isnan().any()):
        raise ValueError(f"{name} has NaN at {int(values.isnan().sum())} of {len(values)} positions.")
    return values


def flat_mask(name: str, mask: Tensor, like: tuple[str, Tensor]) -> Tensor:
    """Return ``mask`` as bool; it must be flat, as long as the tensor ``like[1]``, and bool or made of 0 and 1."""
    _require_shape(name, mask, like)
    if mask.dtype != torch.bool and not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError(f"{name} must be bool or contain only 0 and 1.")
    return mask.bool()


def flat_ids(name: str, ids: Tensor, like: tuple[str, Tensor], limit: int | None = None) -> Tensor:
    """Return ``ids`` as int64; they must be flat, as long as the tensor ``like[1]``, and integers in ``[0, limit)``."""
    if ids.ndim != 1 or ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool:
        raise ValueError(f"{name} must be a flat tensor of integers, got {_describe(ids)}.")
    _require_shape(name, ids, like)
    if len(ids) and (int(ids.min()) < 0 or (limit is not None and int(ids.max()) >= limit)):
        bounds = f"[0, {limit})" if limit is not None else "[0, …)"
        raise ValueError(f"{name} must be in {bounds}, got {int(ids.min())} to {int(ids.max())}.")
    return ids.long()


def flat_counts(name: str, counts: Tensor, like: tuple[str, Tensor]) -> Tensor:
    """Return ``counts`` in the dtype of the tensor ``like[1]``; they must be flat, as long as this tensor, whole and at least 0."""
    _require_shape(name, counts, like)
    converted = counts.to(like[1].dtype)
    if not bool(((converted >= 0) & (converted == converted.floor())).all()):
        raise ValueError(f"{name} must be whole numbers from 0.")
    return converted


def scalar(name: str, value: Tensor) -> Tensor:
    """Return ``value``; it must be a floating-point tensor of shape () and not NaN."""
    if value.ndim != 0 or value.dtype not in _FLOATS:
        raise ValueError(f"{name} must be a float32 or float64 tensor of shape (), got {_describe(value)}.")
    if bool(value.isnan()):
        raise ValueError(f"{name} is NaN.")
    return value


def _require_shape(name: str, values: Tensor, like: tuple[str, Tensor] | None) -> None:
    """Require a flat tensor that is as long as the tensor ``like[1]``, if given."""
    if values.ndim != 1:
        raise ValueError(f"{name} must be a flat tensor, got {_describe(values)}.")
    if like is not None and len(values) != len(like[1]):
        raise ValueError(f"{name} must be as long as {like[0]} ({len(like[1])}), got {len(values)}.")


def _describe(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)} of {tensor.dtype}"


def segment_sum(values: Tensor, segment_ids: Tensor, num_segments: int) -> Tensor:
    """Sum of ``values [N]`` per segment, ``[num_segments]``; 0 for an empty segment."""
    return values.new_zeros(num_segments).index_add(0, segment_ids, values)


def standardise(
    values: Tensor, segment_ids: Tensor, num_segments: int, epsilon: float, mask: Tensor | None = None
) -> Tensor:
    """Standardise ``values [N]`` in each segment: (x − mean) / (σ + ε), with the population standard deviation σ.

    If a ``mask``, bool ``[N]``, is given, mean and σ are those of the values inside the mask, and the result is 0 outside.
    """
    mask = torch.ones_like(segment_ids, dtype=torch.bool) if mask is None else mask
    sizes = segment_sum(mask.to(values.dtype), segment_ids, num_segments).clamp(min=1)
    means = segment_sum(zero_outside(values, mask), segment_ids, num_segments) / sizes
    centred = zero_outside(values - means[segment_ids], mask)
    deviations = (segment_sum(centred.square(), segment_ids, num_segments) / sizes).sqrt()
    return centred / (deviations[segment_ids] + epsilon)


def renumber(ids: Tensor) -> tuple[Tensor, int]:
    """Replace ``ids [N]`` by ``0 … count - 1`` in ascending order, and return them with the count."""
    labels, positions = torch.unique(ids, return_inverse=True)
    return positions, len(labels)


def zero_outside(values: Tensor, mask: Tensor) -> Tensor:
    """Return ``values [T]`` where ``mask`` is set, and 0 with a gradient of 0 elsewhere."""
    return torch.where(mask, values, torch.zeros_like(values))


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of ``values [T]`` where ``mask`` is set, shape (); 0, with an autograd graph, if the mask is empty."""
    return zero_outside(values, mask).sum() / mask.sum().clamp(min=1)
