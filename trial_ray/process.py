"""Memory, progress and timeline events of this process, and functions that run coroutines."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psutil
import ray
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from trial_ray.termination import raise_swallowed_interrupt

Result = TypeVar("Result")

# -- memory ------------------------------------------------------------------------------------------------------------


def peak_memory() -> dict[str, int | None]:
    """Return the peak memory of the calling process since its start, in bytes.

    ``host_bytes`` is resident memory, including pages of Ray's object store, which processes share; ``None`` if the system does
    not report it. ``device_bytes`` is torch's memory on the CUDA devices of this process, summed; ``None`` without CUDA
    devices.
    """
    return {"host_bytes": _resident_peak(), "device_bytes": _device_peak()}


def release_memory() -> None:
    """Return unused memory to the system.

    glibc keeps freed memory, which can be gigabytes after a warm start, and the actors that start on this machine may need it.
    """
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def _resident_peak() -> int | None:
    # Do not use getrusage: its maximum survives an exec, so a worker would report the memory of the process that forked it.
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)


def _device_peak() -> int | None:
    torch = sys.modules.get("torch")  # A process that has not imported torch uses no device memory.
    if torch is None or not torch.cuda.is_initialized():
        return None
    return sum(torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count()))


# -- progress ----------------------------------------------------------------------------------------------------------

PUBLISH_S = 1.0
STDERR = 2
_NAMESPACE = "trial_ray_progress"


@dataclass(frozen=True)
class Progress:
    """Published progress of an actor.

    Attributes:
        node: id of its node.
        pid: id of its process on that node.
        started: start time of that process, in seconds of the node's clock.
        count: finished units of work.
    """

    node: str
    pid: int
    started: float
    count: int


class _ProcessState:
    """Progress of this process.

    Attributes:
        count: finished units of work.
        published_at: ``time.monotonic()`` at the last publication.
        actor: id of the actor that runs in this process; ``None`` if there is none.
        node: id of the actor's node.
        stacks_after_s: seconds without progress until the process writes its Python stacks, or ``None`` to never write them.
    """

    count = 0
    published_at = 0.0
    actor: str | None = None
    node = ""
    stacks_after_s: float | None = None


def advance() -> None:
    """Count one finished unit of this process's work.

    Raises:
        KeyboardInterrupt: a library has swallowed an earlier ``KeyboardInterrupt``; raised only in the main thread.
    """
    raise_swallowed_interrupt()
    _ProcessState.count += 1
    if _ProcessState.actor is not None and time.monotonic() - _ProcessState.published_at > PUBLISH_S:
        _publish()


def announce(stacks_after_s: float | None = None) -> None:
    """Publish this process's progress for the first time, so that the driver can read it; no effect outside actors.

    Args:
        stacks_after_s: seconds without progress, even while idle, after which the process writes its Python stacks to stderr,
            or ``None`` to never write them.
    """
    if ray.is_initialized():
        context = ray.get_runtime_context()
        _ProcessState.actor, _ProcessState.node = context.get_actor_id(), context.get_node_id()
        _ProcessState.stacks_after_s = stacks_after_s
        if _ProcessState.actor is not None:
            _publish()


def own_count() -> int:
    """Return the number of units of work that this process has finished."""
    return _ProcessState.count


def read_progress(actor: str) -> Progress | None:
    """Return the published progress of an actor; ``None`` before it has started.

    Args:
        actor: hexadecimal id of the actor.
    """
    value = _internal_kv_get(actor, namespace=_NAMESPACE)
    return None if value is None else Progress(**json.loads(value))


def forget(actor: str) -> None:
    """Remove an actor's published progress, which Ray would keep as long as the cluster lives."""
    _internal_kv_del(actor, namespace=_NAMESPACE)


def _publish() -> None:
    assert _ProcessState.actor is not None
    _ProcessState.published_at = time.monotonic()
    if _ProcessState.stacks_after_s is not None:
        faulthandler.dump_traceback_later(_ProcessState.stacks_after_s, file=STDERR)
    progress = Progress(_ProcessState.node, os.getpid(), psutil.Process().create_time(), _ProcessState.count)
    with contextlib.suppress(Exception):  # An error of Ray's key-value store must not stop the actor's work.
        _internal_kv_put(_ProcessState.actor, json.dumps(asdict(progress)), namespace=_NAMESPACE)


def runs_here(progress: Progress) -> bool:
    """Return True if the process of ``progress`` still runs on this node; a later process with a reused id does not count."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(progress.pid)
        # Allow a difference of one second: start times are computed from the boot time, which is known to about a second.
        return bool(abs(process.create_time() - progress.started) < 1.0 and process.status() != psutil.STATUS_ZOMBIE)
    return False


# -- events ------------------------------------------------------------------------------------------------------------

ITERATION, STEP, EPISODE, RESPONSE = "iteration", "step", "episode", "response"
"""Event names: the driver's iteration, an engine's step, an env runner's episode, and a response that an episode waited for."""
MAX_EVENTS = 20_000
"""Maximum number of events that a process keeps, a few megabytes; the oldest events are dropped."""


class Event(NamedTuple):
    """An operation of a process.

    Attributes:
        name: name of the operation.
        began: start in seconds, by ``time.time()`` in returned events and by ``time.monotonic()`` in stored events.
        seconds: duration.
        track: name of the operation's episode; empty outside episodes, where operations of one name do not overlap.
        counts: numbers of processed items by name, such as ``response_tokens``.
    """

    name: str
    began: float
    seconds: float
    track: str
    counts: Mapping[str, float]


@dataclass(frozen=True)
class ProcessEvents:
    """Events of one process.

    Attributes:
        host: name of its node.
        pid: id of the process on that node.
        complete_since: time, by ``time.time()`` of the node, after which no event is missing, or 0 if none is missing at all.
        events: events in the order of their ends.
    """

    host: str
    pid: int
    complete_since: float
    events: list[Event]


_events: deque[Event] = deque(maxlen=MAX_EVENTS)


def note_event(name: str, began: float, track: str = "", **counts: float) -> None:
    """Record an event that ends now; callable from any thread.

    Args:
        name: name of the operation.
        began: ``time.monotonic()`` at its start.
        track: see :class:`Event`.
        counts: see :class:`Event`.
    """
    _events.append(Event(name, began, time.monotonic() - began, track, counts))


@contextlib.contextmanager
def event(name: str, **counts: float) -> Iterator[None]:
    """Record the block inside the context as an event; arguments are as in :func:`note_event`."""
    began = time.monotonic()
    try:
        yield
    finally:
        note_event(name, began, "", **counts)


def process_events(since: float, limit: int = MAX_EVENTS) -> ProcessEvents:
    """Return the events of this process that ended after ``since``.

    Args:
        since: a time, by ``time.time()`` of this node.
        limit: maximum number of events; the newest events are returned.
    """
    # Stored events use time.monotonic(); returned events use time.time(), which can be compared between nodes.
    offset = time.time() - time.monotonic()
    # copy() is atomic: other threads may add events.
    events = [event._replace(began=event.began + offset) for event in _events.copy()]
    missing_before = 0.0
    if len(events) == MAX_EVENTS or len(events) > limit:
        events = events[-limit:]
        missing_before = events[0].began + events[0].seconds
    newer = [event for event in events if event.began + event.seconds > since]
    return ProcessEvents(socket.gethostname(), os.getpid(), missing_before, newer)


# -- event loops -------------------------------------------------------------------------------------------------------


def run_in_event_loop(loop: asyncio.Runner, coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine in an event loop and return its result, but keep the result out of the loop's task.

    When :meth:`asyncio.Runner.run` ends, it restores SIGINT's handler, and Python then formats the finished task with the
    task's result. For the trajectories of an iteration, this would take half a second.
    """
    results: list[Result] = []

    async def collect() -> None:
        results.append(await coroutine)

    loop.run(collect())
    return results[0]


def run_outside_event_loop(call: Callable[[], Result]) -> Result:
    """Call a function that runs coroutines; use a separate thread if this thread runs an event loop, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return call()
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(call).result()
