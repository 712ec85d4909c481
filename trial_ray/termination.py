"""Graceful shutdown on SIGINT and SIGTERM; the command line imports this before Ray."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

INTERRUPTING = "finishing the iteration under way, then saving; Ctrl-C again stops at once"


class _Noted:
    """State of this process."""

    interrupt = False


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Handler of a signal that ends the work, wherever it is.

    Raises:
        KeyboardInterrupt: always; again by :func:`raise_swallowed_interrupt` until that is left.
    """
    _Noted.interrupt = True
    raise KeyboardInterrupt


def raise_swallowed_interrupt() -> None:
    """Called in the main thread with each finished unit of work.

    Raises:
        KeyboardInterrupt: the one of :func:`termination_as_interrupt` came up in a library that catches everything.
    """
    if _Noted.interrupt and threading.current_thread() is threading.main_thread():
        raise KeyboardInterrupt


@contextmanager
def _handlers(handler: Callable[[int, FrameType | None], None], *signals: int) -> Iterator[None]:
    """Handle signals while entered; outside the main thread, where Python allows no handlers, nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


@contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """While entered, SIGTERM raises ``KeyboardInterrupt``, as Ctrl-C does, so that the end is recorded and actors are stopped."""
    try:
        with _handlers(_interrupt, signal.SIGTERM):
            yield
    finally:
        _Noted.interrupt = False


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """While entered, Ctrl-C and SIGTERM are noted only; ``KeyboardInterrupt`` follows when it is left.

    For work that must not end half-way, such as the start of Ray, of which processes would stay.
    """
    noted: list[int] = []
    try:
        with _handlers(lambda number, frame: noted.append(number), signal.SIGINT, signal.SIGTERM):
            yield
    finally:
        if noted:
            raise KeyboardInterrupt


class GracefulInterrupt(ExitStack):
    """While entered, the first signal sets :attr:`requested`; the second one raises ``KeyboardInterrupt``.

    An iteration that is cut in the middle leaves a learner that has taken some of its steps; such a state cannot be
    continued as if nothing had happened.
    """

    def __init__(self, on_request: Callable[[], None]) -> None:
        super().__init__()
        self.requested = False
        self._on_request = on_request

    def __enter__(self) -> GracefulInterrupt:
        self.enter_context(_handlers(self._handle, signal.SIGINT, signal.SIGTERM))
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self._on_request()


@dataclass(frozen=True)
class StopRequest:
    """When a run in an actor, which gets no signal, is to be saved and stopped.

    Attributes:
        deadline: ``time.time()`` by which that is to be done; ``None``: never.
        file: once it exists, on a file system that the driver and the actor share.
    """

    deadline: float | None = None
    file: Path | None = None

    def is_due(self, seconds: float = 0.0) -> bool:
        """Whether work of ``seconds`` may no longer begin."""
        late = self.deadline is not None and time.time() + seconds > self.deadline
        return late or (self.file is not None and self.file.exists())
