"""Separate random state for each environment, for libraries that draw from the global generators of ``random`` and NumPy."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from trial_envs.core.forks import fork_safe_lock

_SWAPPED = fork_safe_lock()
"""Lock that is held while the global generators have the state of an environment."""


class RandomState:
    """One environment's states of the global random generators of ``random`` and NumPy.

    Inside :meth:`active`, the global generators continue from the environment's last states, so environments that are
    played in turn do not affect each other. Afterwards, the process's previous states are restored.
    """

    def __init__(self) -> None:
        self._states: tuple[Any, Any] | None = None

    @contextmanager
    def active(self, seed: int | None = None) -> Iterator[None]:
        """Set the global generators to this environment's states or, if ``seed`` (below 2³²) is given, seed them."""
        with _SWAPPED:
            outer = _get()
            if seed is not None:
                random.seed(seed)
                np.random.seed(seed)
            elif self._states is not None:
                _set(self._states)
            try:
                yield
            finally:
                self._states = _get()
                _set(outer)


def _get() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state()


def _set(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
