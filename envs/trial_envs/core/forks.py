"""Fork safety: locks that are free in a forked child, and temporary folders that a child does not remove.

``gymnasium.vector.AsyncVectorEnv`` forks by default. A child has only the thread that forked: a lock that another thread held
at the fork would stay locked forever in the child, and the state that the lock protects would stay half changed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import weakref
from pathlib import Path

_LOCKS: list[threading.RLock] = []
_HELD: list[threading.RLock] = []
"""Locks that the forking thread holds while it forks."""


def fork_safe_lock() -> threading.RLock:
    """Return a re-entrant lock. Every fork waits until the lock is free, so it is also free in the child."""
    lock = threading.RLock()
    _LOCKS.append(lock)
    return lock


def _acquire_all() -> None:
    """Acquire all fork-safe locks before a fork; other threads may nest the locks in any order.

    There is no deadlock, because the forking thread waits for a lock only while it holds none of the others.
    """
    locks = list(_LOCKS)
    while True:
        locks[0].acquire()
        busy = next((n for n, lock in enumerate(locks) if n and not lock.acquire(blocking=False)), None)
        if busy is None:
            _HELD.extend(locks)
            return
        for lock in locks[:busy]:
            lock.release()
        locks[0], locks[busy] = locks[busy], locks[0]


def _release_all() -> None:
    while _HELD:
        _HELD.pop().release()


class ProcessFolder:
    """A temporary folder of the calling process, which is removed when the process ends or the object is garbage-collected.

    A forked child gets a separate folder and does not change its parent's folder.
    """

    def __init__(self) -> None:
        self._owner = 0
        self._path = Path()

    def path(self) -> Path:
        """Return the temporary folder of the calling process, and create the folder if the process has none."""
        with _FOLDERS:
            if self._owner != os.getpid():
                self._path = Path(tempfile.mkdtemp(prefix="trial_envs-"))
                self._owner = os.getpid()
                self._finalizer = weakref.finalize(self, _remove, self._owner, self._path)
            return self._path

    def remove(self) -> None:
        """Remove the folder of this process, if it has one."""
        with _FOLDERS:
            if self._owner == os.getpid():
                self._finalizer()
                self._owner = 0


def _remove(owner: int, path: Path) -> None:
    if owner == os.getpid():
        shutil.rmtree(path, ignore_errors=True)


_FOLDERS = fork_safe_lock()
os.register_at_fork(before=_acquire_all, after_in_parent=_release_all, after_in_child=_release_all)
