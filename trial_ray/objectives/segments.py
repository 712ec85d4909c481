"""Sums and means over segments of flat tensors: tokens of a turn, turns of a trajectory, rollouts of a group."""

from __future__ import annotations

import torch
from torch import Tensor


def segment_sum(values: Tensor, segment_ids: Tensor, num_segments: int) -> Tensor:
    """Sum of ``values [N]`` per segment, ``[num_segments]``; 0 for an empty segment."""
    return values.new_zeros(num_segments).index_add(0, segment_ids, values)


def renumber(ids: Tensor) -> tuple[Tensor, int]:
    """``ids [N]`` replaced by ``0 … count - 1`` in their order of size, and the count."""
    labels, positions = torch.unique(ids, return_inverse=True)
    return positions, len(labels)


def zero_outside(values: Tensor, mask: Tensor) -> Tensor:
    """``values [T]`` where ``mask`` is set, else 0, in the gradient too."""
    return torch.where(mask, values, torch.zeros_like(values))


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of ``values [T]`` where ``mask`` is set, shape (); 0 with a graph where nothing is."""
    return zero_outside(values, mask).sum() / mask.sum().clamp(min=1)
