"""Graceful shutdown on SIGINT, SIGTERM and SIGHUP; the command line imports this before Ray."""

from __future__ import annotations

import os
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType

INTERRUPTING = "finishing the current iteration, then saving; Ctrl-C again stops at once"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TERMINAL_MAJORS = range(136, 144)
"""Major device numbers of Linux's pseudo-terminals."""

_reactions: list[Callable[[int], None]] = []
"""Reactions to a signal of the contexts that are entered, the innermost last."""


class _ProcessState:
    """State of this process, until the outermost context is left.

    Attributes:
        interrupted: whether ``KeyboardInterrupt`` was raised.
        hung_up: whether SIGHUP has come; a closed terminal may send several.
    """

    interrupted = False
    hung_up = False


def _interrupt(number: int) -> None:
    """Interrupt the current work.

    Raises:
        KeyboardInterrupt: always; again by :func:`raise_swallowed_interrupt` until the outermost context is left.
    """
    _ProcessState.interrupted = True
    raise KeyboardInterrupt


def raise_swallowed_interrupt() -> None:
    """Raise a swallowed ``KeyboardInterrupt`` again in the main thread; called after each finished unit of work.

    Raises:
        KeyboardInterrupt: it was raised before, in a library that catches everything.
    """
    if _ProcessState.interrupted and threading.current_thread() is threading.main_thread():
        raise KeyboardInterrupt


@contextmanager
def _reacting(reaction: Callable[[int], None]) -> Iterator[None]:
    """Let signals call ``reaction`` with their number while entered.

    Outside the main thread, where Python allows no handlers, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with ExitStack() as restored:
        if not _reactions:
            _set_handlers(restored)
        _reactions.append(reaction)
        restored.callback(_reactions.pop)
        yield


def _set_handlers(restored: ExitStack) -> None:
    for number in SIGNALS:
        if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
            continue  # nohup has set SIGHUP to be ignored.
        restored.callback(signal.signal, number, signal.signal(number, _handle))
    restored.callback(setattr, _ProcessState, "hung_up", False)
    restored.callback(setattr, _ProcessState, "interrupted", False)


def _handle(number: int, frame: FrameType | None) -> None:
    """Call the innermost reaction; of several SIGHUP, only for the first."""
    if number == signal.SIGHUP:
        _leave_terminal()
        if _ProcessState.hung_up:
            return
        _ProcessState.hung_up = True
    _reactions[-1](number)


def _leave_terminal() -> None:
    """Redirect descriptors of a terminal, which cannot be written once it is closed, to the null device."""
    with suppress(OSError), open(os.devnull, "r+b") as null_device:
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            with suppress(OSError):
                status = os.fstat(descriptor)
                if stat.S_ISCHR(status.st_mode) and os.major(status.st_rdev) in TERMINAL_MAJORS:
                    os.dup2(null_device.fileno(), descriptor, os.get_inheritable(descriptor))


@contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """Raise ``KeyboardInterrupt`` on each signal while entered; the end is then recorded, and actors are stopped."""
    with _reacting(_interrupt):
        yield


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Defer the first signal while entered; ``KeyboardInterrupt`` is raised on exit, or by a second signal.

    For work that should not be interrupted, such as the start of Ray, which would leave processes behind.
    """
    deferred = False

    def defer(number: int) -> None:
        nonlocal deferred
        if deferred or _ProcessState.interrupted:
            _interrupt(number)
        deferred = True

    with termination_as_interrupt():
        try:
            with _reacting(defer):
                yield
        finally:
            if deferred:
                _ProcessState.interrupted = True
                raise KeyboardInterrupt


@contextmanager
def hangups_blocked() -> Iterator[None]:
    """Block SIGHUP while entered, for this thread and the processes that it starts; these processes never receive it.

    A terminal that is closed sends SIGHUP to all processes, including processes that this process needs for its shutdown.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def set_handlers_again() -> None:
    """Set the signal handlers again after the start of Ray.

    Ray's C++ code otherwise handles SIGTERM before Python, and aborts the process at its exit.
    """
    if _reactions and threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            signal.signal(number, signal.getsignal(number))


def end_child_processes() -> None:
    """Kill all child processes of this process, recursively."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            child.kill()


class GracefulInterrupt(ExitStack):
    """Defer an interrupt while entered: the first signal sets :attr:`requested`, the second signal raises ``KeyboardInterrupt``.

    An interrupted iteration leaves a learner that has taken only some of its steps; this state cannot be continued correctly.
    SIGHUP may come with other signals when a session ends, and never counts as the second. Python calls a handler once for all
    signals of one number that come during one call of a native library; they count as one.
    """

    def __init__(self, on_request: Callable[[], None]) -> None:
        super().__init__()
        self.requested = False
        self._on_request = on_request
        self._counted = 0

    def __enter__(self) -> GracefulInterrupt:
        self.enter_context(_reacting(self._react))
        return self

    def _react(self, number: int) -> None:
        self._counted += number != signal.SIGHUP
        if self._counted > 1:
            _interrupt(number)
        if not self.requested:
            self.requested = True
            self._on_request()
