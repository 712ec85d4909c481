"""Watchdog that ends hanging processes, and the decision whether a run restarts after a failure."""

from __future__ import annotations

import faulthandler
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ray.exceptions import RayError, RayTaskError

from trial_ray.algorithms.actors import ENV_RUNNER, LEARNER
from trial_ray.errors import (
    EnvironmentFaultError,
    InfrastructureError,
    TrainingDivergedError,
    is_user_error,
    root_cause,
)
from trial_ray.process import STDERR, own_count

if TYPE_CHECKING:
    from trial_ray.algorithms.grpo import GRPO

logger = logging.getLogger(__name__)

CHECKS = 20
"""Minimum number of checks for progress in ``Watchdog.timeout_s`` seconds."""
MAX_PAUSE_S = 10.0
ANSWER_S = 30.0
"""Maximum number of seconds to wait for the end of a running check when the context :meth:`Watchdog.watching` exits."""


@dataclass(eq=False)
class Watchdog:
    """Checks the progress of every process of a run, in a separate thread.

    After ``timeout_s`` seconds without any progress, the watchdog kills the actors that the driver may wait for: the run
    replaces them, or restarts from its checkpoint. After the same time again without progress, it ends the driver's process.

    Attributes:
        algorithm: the run's algorithm.
        timeout_s: seconds without progress after which actors are killed.
        print_line: prints a line.
        give_up: called with the reason if killing actors did not help; ends the run.
    """

    algorithm: GRPO
    timeout_s: float
    print_line: Callable[[str], None]
    give_up: Callable[[str], None]

    def __post_init__(self) -> None:
        self._done: Counter[str] = Counter()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch for stalls inside the context."""
        ended = threading.Event()
        thread = threading.Thread(target=self._watch, args=(ended,), name="watchdog", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(ANSWER_S)

    def _watch(self, ended: threading.Event) -> None:
        pause = min(self.timeout_s / CHECKS, MAX_PAUSE_S)
        last, has_killed = time.monotonic(), False
        while not ended.wait(pause):
            try:
                if self._has_progressed():
                    last, has_killed = time.monotonic(), False
                elif time.monotonic() - last > self.timeout_s:
                    self._act(has_killed)
                    last, has_killed = time.monotonic(), True
            except Exception:  # An error of the watchdog must not end the run.
                logger.exception("the watchdog failed")

    def _has_progressed(self) -> bool:
        """Return True if a process has done work since the last check; the restart of a killed actor is not progress."""
        published = {actor.id: actor.progress() for actor in self.algorithm.actors()}
        before = self._done
        self._done = Counter({name: progress.count for name, progress in published.items() if progress is not None})
        self._done["driver"] = own_count()
        return bool(self._done - before)  # Counter's difference has only the counts that have grown.

    def _act(self, has_killed: bool) -> None:
        phase = self.algorithm.phase
        # Outside of updates and weight syncs, do not kill the learners: the driver does not wait for them, and their state
        # would be lost.
        hung = [actor for actor in self.algorithm.actors() if phase in ("update", "sync") or actor.kind != LEARNER]
        names = ", ".join(actor.name for actor in hung)
        decision = "stopping with exit code 1" if has_killed else f"ending {names}, so that the run continues without"
        line = f"no progress for {self.timeout_s:g} s ({phase or 'between phases'}); {decision}"
        self.print_line(f"{line}; stacks of the processes that hang are in their logs")
        faulthandler.dump_traceback(STDERR)
        if has_killed:
            self.give_up(line)
            return
        for actor in hung:
            # Ray restarts env runners automatically.
            actor.kill(restart=actor.kind == ENV_RUNNER)


def is_recoverable(error: Exception) -> bool:
    """Return True if a restart with new actors may succeed, because a process, a node or a transfer failed.

    A restart would repeat failures that the user's input, an environment, a diverged policy or this package's code caused.
    """
    cause = root_cause(error)
    if is_user_error(error) or isinstance(cause, TrainingDivergedError | EnvironmentFaultError):
        return False
    return isinstance(cause, InfrastructureError) or (
        isinstance(error, RayError) and not isinstance(error, RayTaskError)
    )
