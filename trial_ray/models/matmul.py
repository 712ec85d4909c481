"""The rate of matrix products on a device, against which the learner's passes are compared."""

from __future__ import annotations

import time

import torch

SIZES = {"cpu": 1024, "cuda": 8192}
"""Rows of the square matrices: large enough to be bound by arithmetic, small enough to be timed several times."""
SECONDS = 0.3


def matmul_rate(device: torch.device | str, dtype: torch.dtype) -> float:
    """Floating-point operations per second of a large matrix product: the best of those that fit into :data:`SECONDS`.

    Args:
        device: where the learner computes; with a CPU, torch's threads of this process take part.
        dtype: in which its matrix products are.
    """
    device = torch.device(device)
    size = SIZES.get(device.type, 1024)
    left, right = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    _timed(left, right)  # the first product loads kernels and chooses among them
    best, began = float("inf"), time.perf_counter()
    while time.perf_counter() - began < SECONDS:
        best = min(best, _timed(left, right))
    return 2 * size**3 / best


@torch.no_grad()
def _timed(left: torch.Tensor, right: torch.Tensor) -> float:
    began = time.perf_counter()
    product = left @ right
    product[0, 0].item()  # waits for the device
    return time.perf_counter() - began
