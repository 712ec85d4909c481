"""Graceful shutdown on SIGINT, SIGTERM and SIGHUP; the command line imports this before Ray."""

from __future__ import annotations

import os
import signal
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType

INTERRUPTING = "finishing the current iteration, then saving; Ctrl-C again stops at once"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TERMINAL_MAJORS = range(136, 144)
"""Major device numbers of Linux's pseudo-terminals."""


_reactions: list[Callable[[int], None]] = []
"""Reactions to a signal of the contexts that are entered, the innermost last."""
_arrived: Counter[int] = Counter()
"""Signals by number that no handler has counted yet."""


class _Own:
    """State of this process, until the outermost context is left.

    Attributes:
        interrupt: whether ``KeyboardInterrupt`` was raised.
        hung_up: whether the terminal was closed, for which several SIGHUP may come.
    """

    interrupt = False
    hung_up = False


def _interrupt(number: int) -> None:
    """Interrupt the current work.

    Raises:
        KeyboardInterrupt: always; again by :func:`raise_swallowed_interrupt` until the outermost context is left.
    """
    _Own.interrupt = True
    raise KeyboardInterrupt


def raise_swallowed_interrupt() -> None:
    """Raise a swallowed ``KeyboardInterrupt`` again in the main thread; called after each finished unit of work.

    Raises:
        KeyboardInterrupt: it was raised before, in a library that catches everything.
    """
    if _Own.interrupt and threading.current_thread() is threading.main_thread():
        raise KeyboardInterrupt


@contextmanager
def _reacting(reaction: Callable[[int], None]) -> Iterator[None]:
    """Let signals call ``reaction`` with their number while entered.

    Outside the main thread, where Python allows no handlers, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with ExitStack() as undone:
        if not _reactions:
            _install(undone)
        _reactions.append(reaction)
        undone.callback(_reactions.pop)
        yield


def _install(undone: ExitStack) -> None:
    reader, writer = os.pipe()
    for end in (reader, writer):
        undone.callback(os.close, end)
        os.set_blocking(end, False)

    def handle(number: int, frame: FrameType | None) -> None:
        for _ in range(_count(reader, number)):
            _reactions[-1](number)

    # Python calls a handler once for all signals that came while a library's code, such as Ray's, was waiting.
    undone.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(writer, warn_on_full_buffer=False))
    for number in SIGNALS:
        if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
            continue  # nohup
        undone.callback(signal.signal, number, signal.signal(number, handle))
    undone.callback(setattr, _Own, "hung_up", False)
    undone.callback(setattr, _Own, "interrupt", False)
    undone.callback(_arrived.clear)


def _count(reader: int, number: int) -> int:
    """Return the number of signals of a kind to handle."""
    with suppress(BlockingIOError):  # a byte each
        _arrived.update(os.read(reader, 4096))
    found = max(1, _arrived.pop(number, 0))
    if number != signal.SIGHUP:
        return found
    _leave_terminal()
    again, _Own.hung_up = _Own.hung_up, True
    return 0 if again else 1


def _leave_terminal() -> None:
    """Redirect descriptors of a terminal, which cannot be written once it is closed, to the null device."""
    with suppress(OSError), open(os.devnull, "r+b") as nowhere:
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            with suppress(OSError):
                found = os.fstat(descriptor)
                if stat.S_ISCHR(found.st_mode) and os.major(found.st_rdev) in TERMINAL_MAJORS:
                    os.dup2(nowhere.fileno(), descriptor, os.get_inheritable(descriptor))


def _forget_in_child() -> None:
    """A forked child shares the pipe: what it got would count as another signal of its parent."""
    if _reactions:
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget_in_child)


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
    noted = 0

    def note(number: int) -> None:
        nonlocal noted
        if noted or _Own.interrupt:
            _interrupt(number)
        noted = number

    with termination_as_interrupt():
        try:
            with _reacting(note):
                yield
        finally:
            if noted:
                _interrupt(noted)


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
    SIGHUP may come with other signals when a session ends, and is not counted.
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
