"""What there is to run on: asked of the driver's host and of Ray, without opening a CUDA context."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping

from trial_ray.planning.memory import GIB
from trial_ray.planning.step_time import Device

RAY_ACCELERATORS = {
    "T4": 15,
    "L4": 22,
    "A10G": 22,
    "V100": 16,
    "L40S": 44,
    "A100-40G": 39,
    "A100-80G": 79,
    "H100": 79,
    "H200": 140,
    "B200": 179,
}
"""GiB of the GPU types that Ray names in a node's resources (``accelerator_type:...``), where a type has one size."""
HOST_BANDWIDTH = 10e9
"""Bytes per second that a CPU reads out of memory, where nothing better is known."""


def visible_gpus() -> list[tuple[str, float]]:
    """Name and bytes of every NVIDIA GPU of this host; empty where there is none."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (subprocess.SubprocessError, OSError):
        return []
    rows = [line.rpartition(", ") for line in done.stdout.splitlines()]
    return [(name, float(mib) * 2**20) for name, _, mib in rows if mib.isdigit()]


def gpu_bytes(cluster_resources: Mapping[str, float]) -> float | None:
    """Memory of the largest GPU that this host or Ray's nodes are known to have; ``None`` where none is known.

    The largest, because a run is only refused where it fits on none of them.
    """
    types = [
        name.removeprefix("accelerator_type:") for name in cluster_resources if name.startswith("accelerator_type:")
    ]
    known = [RAY_ACCELERATORS[name] * GIB for name in types if name in RAY_ACCELERATORS]
    return max([*(size for _, size in visible_gpus()), *known], default=None)


def host_bytes() -> float:
    """Memory of this host."""
    import psutil

    return float(psutil.virtual_memory().total)


def measured_cpu() -> Device:
    """This host's CPU: the speed of a matrix product with torch's threads, measured now."""
    import torch

    from trial_ray.models.matmul import matmul_rate

    rate = matmul_rate("cpu", torch.float32)
    return Device(f"this CPU ({rate / 1e9:,.0f} GFLOP/s, measured)", rate, HOST_BANDWIDTH, host_bytes())
