"""Events of a process, what it did and when, for the timeline of an iteration."""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

ITERATION, STEP, EPISODE, RESPONSE = "iteration", "step", "episode", "response"
"""An iteration of the driver, a step of an engine, an env runner's episode, and a response that an episode waited for."""
MOST_EVENTS = 20_000
"""Events that a process keeps, the newest ones: a few megabytes."""


class Event(NamedTuple):
    """Something that a process did.

    Attributes:
        name: of what was done.
        began: in seconds; of ``time.time()`` where it is handed out, of ``time.monotonic()`` where it is kept.
        seconds: that it took.
        track: name of the episode that it belongs to; empty for work that does not overlap other work of its name.
        counts: numbers of what was worked on.
    """

    name: str
    began: float
    seconds: float
    track: str
    counts: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ProcessEvents:
    """Events of one process.

    Attributes:
        host: name of its node.
        pid: of the process there.
        complete_since: time from which on no event is missing; ``time.time()`` of the node, as in the events.
        events: by the time at which they ended.
    """

    host: str
    pid: int
    complete_since: float
    events: list[Event]


_kept: deque[Event] = deque(maxlen=MOST_EVENTS)


def note_event(name: str, began: float, track: str = "", **counts: float) -> None:
    """Keep an event that ends now; from any thread.

    Args:
        name: of what was done.
        began: ``time.monotonic()`` of its beginning.
        track: see :class:`Event`.
        counts: see :class:`Event`.
    """
    _kept.append(Event(name, began, time.monotonic() - began, track, counts))


@contextmanager
def event(name: str, **counts: float) -> Iterator[None]:
    """Keep the block as an event; arguments as :func:`note_event`."""
    began = time.monotonic()
    try:
        yield
    finally:
        note_event(name, began, "", **counts)


def process_events(since: float, most: int = MOST_EVENTS) -> ProcessEvents:
    """The events of this process that ended after ``since``.

    Args:
        since: ``time.time()``.
        most: events that are handed out, the newest ones.
    """
    # One clock for durations, the other for times of several nodes.
    offset = time.time() - time.monotonic()
    kept = list(_kept.copy())  # other threads cannot add to it within the call
    events = [each._replace(began=each.began + offset) for each in kept]
    missing_before = 0.0
    if len(events) == MOST_EVENTS or len(events) > most:
        events = events[-most:]
        missing_before = events[0].began + events[0].seconds
    wanted = [each for each in events if each.began + each.seconds > since]
    return ProcessEvents(socket.gethostname(), os.getpid(), missing_before, wanted)
