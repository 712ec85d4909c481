"""Copies of the planner's library, lent to engines and taken back.

Fast Downward keeps a game's state in global variables, so every engine that plays needs a copy of the library of its
own. Unloading a copy (``fast_downward.close_lib``) is not safe: all copies of a process share the first one's registry
of components, which then points into memory that is gone, and the next load crashes the process. A copy that is given
back is therefore emptied and lent again: memory is bounded by the largest number of engines that ever ran at once.
"""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any, TypeVar

from trial_envs.errors import MissingEngineError

AnyLock = TypeVar("AnyLock", bound=Any)


def forkable(lock: AnyLock) -> AnyLock:
    """Sees to it that a process forks only while no other thread holds the lock, so that the child finds it free."""
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock


LOCK = forkable(threading.RLock())
"""Held during every call into any copy: because of what the copies share, unguarded threads crash the process."""


class LibraryPool:
    """The copies that nobody uses at the moment."""

    def __init__(self) -> None:
        self._free: list[Any] = []

    def acquire(self) -> Any:
        """A copy for one engine; loaded now if none is free.

        Raises:
            MissingEngineError: Fast Downward is not installed.
        """
        try:
            import fast_downward
        except ImportError as error:
            raise MissingEngineError("ALFWorld needs Fast Downward: pip install 'trial-ray[alfworld]'") from error
        with LOCK:
            return self._free.pop() if self._free else fast_downward.load_lib()

    def release(self, library: Any) -> None:
        """Takes a copy back and frees the game that it holds."""
        with LOCK:
            library.cleanup()
            self._free.append(library)


LIBRARIES = LibraryPool()


def give_back_memory() -> None:
    """Hands free heap back to the system: a translation uses tens of megabytes for a moment, in many small pieces.

    Without it a process keeps what its largest game so far needed. Does nothing where the C library is not glibc.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def applicable_operators(library: Any) -> Any:
    """The operators that can be applied now, in the library's order."""
    import fast_downward

    operators = (fast_downward.Operator * library.get_applicable_operators_count())()
    library.get_applicable_operators(operators)
    return operators


def apply_operator(library: Any, operator: Any) -> list[str]:
    """Applies an operator; returns the literals that it made true."""
    import fast_downward

    effects = (fast_downward.Atom * operator.nb_effect_atoms)()
    library.apply_operator(operator.id, effects)
    return [effect.name for effect in effects]
