"""A pool of copies of the library of Fast Downward, the planner; each running engine uses one copy.

Fast Downward keeps a game's state in global variables, so every running engine needs its own copy of the library.
Unloading a copy (``fast_downward.close_lib``) is not safe: all copies of a process share the first copy's registry of
components. After the unloading, the registry points to freed memory, and the next load crashes the process. A released
copy is therefore emptied and reused: memory is bounded by the largest number of engines that ran at the same time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

from trial_envs.core.extras import install_command
from trial_envs.core.forks import fork_safe_lock
from trial_envs.errors import MissingEngineError


class Operator(Protocol):
    """``fast_downward.Operator``: an operator, that is, a PDDL action with its arguments."""

    id: int
    _name: bytes
    """The action's name and its arguments, separated by spaces and encoded in the code page 1252."""
    nb_effect_atoms: int


class Library(Protocol):
    """The functions of Fast Downward's library that this package calls; see ``fast_downward.load_lib``."""

    def load_sas(self, sas: bytes) -> None:
        """Load a game that was translated to SAS, the input format of Fast Downward."""

    def load_sas_replan(self, sas: bytes) -> None:
        """Load a second translation of the loaded game, made for planning; :meth:`replan` searches in it."""

    def replan(self, verbose: bool) -> bool:
        """Search for a plan from the current state; return whether it found a plan."""

    def get_last_plan_length(self) -> int:
        """Return the number of operators of the last plan."""

    def check_goal(self) -> bool:
        """Return whether the goal is reached."""

    def get_applicable_operators_count(self) -> int:
        """Return the number of operators that can be applied in the current state."""

    def get_applicable_operators(self, operators: object) -> None:
        """Write the operators that are applicable in the current state into a ctypes array of ``fast_downward.Operator``."""

    def apply_operator(self, operator: int, effects: object) -> int:
        """Apply the operator with this id and write its effects into a ctypes array of ``fast_downward.Atom``."""

    def cleanup(self) -> None:
        """Free the loaded game."""


LOCK = fork_safe_lock()
"""Lock for calls of Fast Downward: all copies share state, so simultaneous calls from several threads crash the process."""


class LibraryPool:
    """Unused copies of Fast Downward."""

    def __init__(self) -> None:
        self._free: list[Library] = []

    def acquire(self) -> Library:
        """Return an unused copy of Fast Downward for one engine; load another copy if there is none.

        Raises:
            MissingEngineError: Fast Downward is not installed.
        """
        try:
            import fast_downward
        except ImportError as error:
            raise MissingEngineError(f"Fast Downward is not installed: {install_command('alfworld')}") from error
        with LOCK:
            if self._free:
                return self._free.pop()
            loaded: Library = fast_downward.load_lib()
            return loaded

    def release(self, library: Library) -> None:
        """Free the game that a copy of Fast Downward has loaded, and return the copy to the pool."""
        with LOCK:
            library.cleanup()
            self._free.append(library)


LIBRARIES = LibraryPool()


def trim_heap() -> None:
    """Return free heap memory to the system, because translating a game to SAS allocates tens of megabytes in small blocks.

    Without this call, a process keeps the memory of the largest translation so far. If the C library is
    not glibc, the function does nothing.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def applicable_operators(library: Library) -> Sequence[Operator]:
    """Return the operators that can be applied in the current state of the game, in Fast Downward's order."""
    import fast_downward

    operators: Sequence[Operator] = (fast_downward.Operator * library.get_applicable_operators_count())()
    library.get_applicable_operators(operators)
    return operators


def apply_operator(library: Library, operator: Operator) -> list[str]:
    """Apply an operator; return the literals that it makes true, such as ``Atom p(a, b)``."""
    import fast_downward

    effects = (fast_downward.Atom * operator.nb_effect_atoms)()
    library.apply_operator(operator.id, effects)
    return [effect.name for effect in effects]
