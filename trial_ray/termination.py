"""SIGTERM as ``KeyboardInterrupt``, raised once more where a library swallows it; the command line imports it before Ray."""

from __future__ import annotations

import threading
from types import FrameType


class _Noted:
    """State of this process."""

    interrupt = False


def interrupt(number: int, frame: FrameType | None) -> None:
    """Handler of a signal that ends the work, wherever it is.

    Raises:
        KeyboardInterrupt: always; again by :func:`raise_swallowed_interrupt` until :func:`forget_interrupt`.
    """
    _Noted.interrupt = True
    raise KeyboardInterrupt


def raise_swallowed_interrupt() -> None:
    """Called in the main thread with each finished unit of work.

    Raises:
        KeyboardInterrupt: the one of :func:`interrupt` came up in a library that catches everything.
    """
    if _Noted.interrupt and threading.current_thread() is threading.main_thread():
        raise KeyboardInterrupt


def forget_interrupt() -> None:
    """The interrupt, if there was one, has reached the command."""
    _Noted.interrupt = False
