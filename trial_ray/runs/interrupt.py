"""Ctrl-C and SIGTERM, taken as a wish to stop after the iteration that is under way."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

from trial_ray.termination import forget_interrupt, interrupt


@contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """While entered, SIGTERM raises ``KeyboardInterrupt``, as Ctrl-C does, so that the end is recorded and actors are stopped."""
    if threading.current_thread() is not threading.main_thread():  # Python allows handlers nowhere else
        yield
        return
    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
        forget_interrupt()


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """While entered, Ctrl-C and SIGTERM are noted only; ``KeyboardInterrupt`` follows when it is left.

    For what must not end half-way, such as the start of Ray, of which processes would stay.
    """
    if threading.current_thread() is not threading.main_thread():  # Python allows handlers nowhere else
        yield
        return
    noted: list[int] = []
    previous = {
        number: signal.signal(number, lambda number, frame: noted.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if noted:
            raise KeyboardInterrupt


class GracefulInterrupt(AbstractContextManager["GracefulInterrupt"]):
    """While entered, the first signal sets :attr:`requested`; the second one raises ``KeyboardInterrupt``.

    An iteration that is cut in the middle leaves a learner that has taken some of its steps; such a state cannot be
    continued as if nothing had happened.
    """

    def __init__(self, on_request: Callable[[], None] = lambda: None) -> None:
        self.requested = False
        self._on_request = on_request
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> GracefulInterrupt:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self._on_request()
