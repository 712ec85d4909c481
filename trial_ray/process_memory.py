"""The most memory that this process has held, and what its machine has left."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """Peaks since the process began, in bytes.

    Attributes:
        host_bytes: resident memory, the pages that it shares with other processes (the object store's) included; ``None``
            where the system does not tell.
        device_bytes: what torch held on the CUDA devices of this process, summed over them; ``None`` without any.
    """

    host_bytes: int | None
    device_bytes: int | None


def peak_memory() -> PeakMemory:
    """Peaks of the calling process."""
    return PeakMemory(_host(), _device())


def available_memory() -> int | None:
    """Bytes of host memory that new allocations can take; ``None`` where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kilobytes = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return 1024 * int(kilobytes[0]) if kilobytes else None


def _host() -> int | None:
    # Not getrusage: its maximum survives an exec, so that a worker shows the memory of the process that forked it.
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return None
    kilobytes = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
    return 1024 * int(kilobytes[0]) if kilobytes else None


def _device() -> int | None:
    torch = sys.modules.get("torch")  # a process without torch holds nothing there
    if torch is None or not torch.cuda.is_initialized():
        return None
    held: int = sum(torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count()))
    return held
