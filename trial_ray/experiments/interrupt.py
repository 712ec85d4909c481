"""Ctrl-C and SIGTERM, taken as a wish to stop after the iteration that is under way."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any


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
