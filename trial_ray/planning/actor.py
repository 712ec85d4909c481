"""Memory of an actor, and what every process holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trial_ray.planning.request import GIB

PROCESS_BYTES = 550 * 2**20
"""Resident memory of a process that has imported Ray, RLlib, torch and transformers, and holds no model yet; measured."""
DEVICE_CONTEXT_BYTES = 1 * GIB
"""CUDA context, cuBLAS workspaces and NCCL buffers of a process."""

GPU_PROCESS_BYTES = 3 * GIB
"""Host memory of a process that computes on a GPU: Python, torch, CUDA's libraries and their kernels. An assumption; ``cost.json``
has the measured peak of every actor."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that one actor holds at its peak.

    Attributes:
        actor, count: kind and number of actors.
        on_gpu: whether it is a GPU's memory, else the host's.
        items: bytes by purpose.
        kept: bytes of these that a learner holds between two updates.
        rows: requests of full length that an engine's key-value cache holds; 0 where it would not start.
    """

    actor: str
    count: int
    on_gpu: bool
    items: Mapping[str, float]
    kept: float = 0.0
    rows: float = 0.0

    @property
    def total(self) -> float:
        """Bytes of one actor."""
        return sum(self.items.values())
