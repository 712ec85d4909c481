"""Graceful shutdown on SIGINT, SIGTERM and SIGHUP; the command line imports this module before Ray."""

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
"""Functions that handle signals, one for each active context of this module; only the last, the innermost one, is called."""


class _ProcessState:
    """State of this process until the outermost of this module's contexts exits.

    Attributes:
        interrupted: whether ``KeyboardInterrupt`` was raised.
        hung_up: whether SIGHUP was received; a closed terminal may send it several times.
    """

    interrupted = False
    hung_up = False


def _interrupt(number: int) -> None:
    """Interrupt the current work.

    Raises:
        KeyboardInterrupt: always. Until the outermost of this module's contexts exits,
            :func:`raise_swallowed_interrupt` raises it again.
    """
    _ProcessState.interrupted = True
    raise KeyboardInterrupt


def raise_swallowed_interrupt() -> None:
    """Raise a swallowed ``KeyboardInterrupt`` again in the main thread; called regularly during long tasks.

    Raises:
        KeyboardInterrupt: it was raised before, and a library that catches every exception has caught it.
    """
    if _ProcessState.interrupted and threading.current_thread() is threading.main_thread():
        raise KeyboardInterrupt


@contextmanager
def _reacting(reaction: Callable[[int], None]) -> Iterator[None]:
    """Call ``reaction`` with the number of each SIGINT, SIGTERM or SIGHUP that arrives inside the context.

    The context has no effect outside the main thread, where Python allows no signal handlers.
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
    """Call the last of ``_reactions``; repeated SIGHUP signals are ignored."""
    if number == signal.SIGHUP:
        _leave_terminal()
        if _ProcessState.hung_up:
            return
        _ProcessState.hung_up = True
    _reactions[-1](number)


def _leave_terminal() -> None:
    """Redirect file descriptors of the terminal to the null device: a closed terminal cannot be written to."""
    with suppress(OSError), open(os.devnull, "r+b") as null_device:
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            with suppress(OSError):
                status = os.fstat(descriptor)
                if stat.S_ISCHR(status.st_mode) and os.major(status.st_rdev) in TERMINAL_MAJORS:
                    os.dup2(null_device.fileno(), descriptor, os.get_inheritable(descriptor))


@contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """Raise ``KeyboardInterrupt`` on SIGINT, SIGTERM and SIGHUP, so that callers can record the run's end and stop actors."""
    with _reacting(_interrupt):
        yield


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Defer the first SIGINT, SIGTERM or SIGHUP; ``KeyboardInterrupt`` is raised when the context exits, or by a second signal.

    Use it for work that must not be interrupted: an interrupted start of Ray, for example, leaves processes behind.
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
    """Block SIGHUP inside the context for this thread; processes that are started inside the context never receive SIGHUP.

    A terminal that is closed sends SIGHUP to all processes, including processes that this process needs for its shutdown.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def set_handlers_again() -> None:
    """Set the signal handlers again after the start of Ray.

    Otherwise, Ray's C++ code handles SIGTERM before Python does, and aborts the process at exit.
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
    """Defer an interrupt inside the context: the first SIGINT, SIGTERM or SIGHUP sets :attr:`requested`.

    SIGINT and SIGTERM are counted together, and the second of them raises ``KeyboardInterrupt``. SIGHUP is not counted, since it
    may arrive together with other signals when a terminal session ends. Equal signals that arrive during one call of a native
    library count as one, because Python calls the handler once.

    A learner that is interrupted within an iteration has taken only some of its steps, and cannot continue correctly from there.

    Args:
        on_request: called at the first signal.
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
