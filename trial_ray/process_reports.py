"""Memory of a process, and reports of its progress."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import ray
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from trial_ray.termination import raise_swallowed_interrupt


def peak_memory() -> dict[str, int | None]:
    """Peaks since the calling process began, in bytes.

    ``host_bytes`` is resident memory, with the pages shared with other processes (the object store's); ``None`` where the
    system does not report it. ``device_bytes`` is torch's memory on the CUDA devices of this process, summed; ``None`` without
    any.
    """
    return {"host_bytes": _bytes_in("/proc/self/status", "VmHWM:"), "device_bytes": _device()}


def available_memory() -> int | None:
    """Bytes of host memory that new allocations can take; ``None`` where the system does not report them."""
    return _bytes_in("/proc/meminfo", "MemAvailable:")


def release_memory() -> None:
    """Give memory that is no longer used back to the system.

    glibc keeps what the tensors of an optimizer and of its passes took, gigabytes after cloning into a language model: too
    little would be left for the actors that start beside this process.
    """
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def _bytes_in(file: str, name: str) -> int | None:
    # Not getrusage: its maximum survives an exec, so that a worker shows the memory of the process that forked it.
    try:
        lines = Path(file).read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(name)), None)


def _device() -> int | None:
    torch = sys.modules.get("torch")  # a process without torch holds nothing there
    if torch is None or not torch.cuda.is_initialized():
        return None
    held: int = sum(torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count()))
    return held


PUBLISH_S = 1.0
STACKS_FILE = "trial_ray_stacks"
STACKS_TIMEOUT_S = 2.0
_NAMESPACE = "trial_ray_progress"


@dataclass(frozen=True, slots=True)
class Progress:
    """Published progress of an actor.

    Attributes:
        node: id of its node.
        pid: of its process there.
        count: units of work that it has finished.
        work: what a unit is.
    """

    node: str
    pid: int
    count: int
    work: str


class _Own:
    """State of this process."""

    count = 0
    published_at = 0.0
    actor: str | None = None
    node = ""
    stacks: int | None = None


def advance(work: str) -> None:
    """Count one finished unit of this process's work.

    Args:
        work: what it was, for a person to read.

    Raises:
        KeyboardInterrupt: as :func:`~trial_ray.termination.raise_swallowed_interrupt`.
    """
    raise_swallowed_interrupt()
    _Own.count += 1
    if _Own.actor is not None and time.monotonic() - _Own.published_at > PUBLISH_S:
        _publish(work)


def announce() -> None:
    """Let this process be watched: publish its first count, if it is an actor, and be ready to write its stacks."""
    if _Own.stacks is None and hasattr(os, "memfd_create"):  # Linux has it
        _Own.stacks = os.memfd_create(STACKS_FILE)
        os.ftruncate(_Own.stacks, 0)
        faulthandler.register(signal.SIGUSR2, file=_Own.stacks, all_threads=True)
    if ray.is_initialized():
        context = ray.get_runtime_context()
        _Own.actor, _Own.node = context.get_actor_id(), context.get_node_id()
        if _Own.actor is not None:
            _publish("start")


def own_count() -> int:
    """Units of work that this process has finished."""
    return _Own.count


def read_progress(actor: str) -> Progress | None:
    """Published progress of an actor; ``None`` before it has started.

    Args:
        actor: its id, hexadecimal.
    """
    value = _internal_kv_get(actor, namespace=_NAMESPACE)
    return None if value is None else Progress(**json.loads(value))


def forget(actor: str) -> None:
    """Remove what an actor has published, which Ray would keep as long as the cluster lives."""
    _internal_kv_del(actor, namespace=_NAMESPACE)


def _publish(work: str) -> None:
    assert _Own.actor is not None
    progress = Progress(_Own.node, os.getpid(), _Own.count, work)
    with contextlib.suppress(Exception):  # the work itself needs no key-value store
        _internal_kv_put(_Own.actor, json.dumps(asdict(progress)), namespace=_NAMESPACE)
    _Own.published_at = time.monotonic()


def is_announced(pid: int) -> bool:
    """Whether a process of this node and user has called :func:`announce`; a number that the system uses again has not."""
    return _stacks_file(pid) is not None


def describe_processes(pids: Sequence[int]) -> dict[int, str]:
    """State (as ``ps`` names it) and Python stacks of processes of this node; a process that is stopped writes none."""
    return {pid: _described(pid) for pid in pids}


def _described(pid: int) -> str:
    import psutil

    try:
        state = psutil.Process(pid).status()
        file = None if state in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE) else _stacks_file(pid)
        return f"{state}; {'it writes no stacks' if file is None else _written_stacks(pid, file)}"
    except (psutil.Error, OSError):
        return "gone"


def _written_stacks(pid: int, file: Path) -> str:
    before = size = file.stat().st_size
    os.kill(pid, signal.SIGUSR2)
    deadline = time.monotonic() + STACKS_TIMEOUT_S
    while time.monotonic() < deadline:
        time.sleep(0.1)
        if (now := file.stat().st_size) == size and now > before:
            break
        size = now
    with file.open(encoding="utf-8", errors="replace") as stream:
        stream.seek(before)
        return stream.read() or f"it wrote no stacks within {STACKS_TIMEOUT_S:.0f} s"


def _stacks_file(pid: int) -> Path | None:
    with contextlib.suppress(OSError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # the process closed it meanwhile
                if STACKS_FILE in os.readlink(file):
                    return file
    return None
