"""What data-parallel learners tell each other: sums of tensors, and small objects of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed

BUCKET_ELEMENTS = 1 << 24
"""Elements that go into one sum: many small tensors together, without a second copy of a large model."""


class LearnerExchange:
    """The group of learners of a run; with one learner nothing is exchanged.

    Every learner must make the same calls in the same order.

    Args:
        num_learners: how many there are.
        device: where the learner computes; tensors elsewhere take a way through it.
    """

    def __init__(self, num_learners: int, device: torch.device | str) -> None:
        self.num_learners = max(1, num_learners)
        self.rank = distributed.get_rank() if self.num_learners > 1 else 0
        self._device = torch.device(device)

    @torch.no_grad()
    def add_up(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace each tensor by its sum over all learners, in place, the same to the last bit on every learner.

        Args:
            tensors: of the same shapes and dtypes on every learner.
        """
        if self.num_learners == 1:
            return
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.reshape(-1).to(self._device) for tensor in bucket])
            distributed.all_reduce(flat)
            sums = flat.split([tensor.numel() for tensor in bucket])
            for tensor, total in zip(bucket, sums, strict=True):
                tensor.copy_(total.view_as(tensor))

    def gather(self, value: Any) -> list[Any]:
        """The values of all learners, by rank; small, picklable ones."""
        if self.num_learners == 1:
            return [value]
        values: list[Any] = [None] * self.num_learners
        distributed.all_gather_object(values, value)
        return values


def _buckets(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Consecutive tensors of one dtype with at most ``BUCKET_ELEMENTS`` together, or a single larger one."""
    buckets: list[list[torch.Tensor]] = []
    size = 0
    for tensor in tensors:
        if not buckets or tensor.dtype != buckets[-1][0].dtype or size + tensor.numel() > BUCKET_ELEMENTS:
            buckets.append([])
            size = 0
        buckets[-1].append(tensor)
        size += tensor.numel()
    return buckets
