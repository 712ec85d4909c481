"""Actors of a run: their names and progress, and how their processes are ended."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray

from trial_ray.engines.pool import answers
from trial_ray.process import Progress, forget, read_progress, runs_here
from trial_ray.ray_internals import actor_id

logger = logging.getLogger(__name__)

ENV_RUNNER, ENGINE, LEARNER = "env runner", "engine", "learner"
ANSWER_S = 5.0
"""Seconds that actors have to answer a call when a run ends; an actor that does not answer in time is killed at once."""
RAY_ENDS_S = 2.0
"""Seconds that Ray has to end a killed actor's process; SIGKILL is then sent to the process."""
PROCESS_ENDS_S = 10.0
"""Seconds to wait until the processes of killed actors have ended."""


@dataclass(frozen=True)
class RunActor:
    """One actor of a run.

    Attributes:
        kind: :data:`ENV_RUNNER`, :data:`ENGINE` or :data:`LEARNER`.
        index: index among the actors of its kind.
        handle: Ray's handle of the actor.
    """

    kind: str
    index: int
    handle: Any

    @property
    def name(self) -> str:
        """Human-readable name: kind and index."""
        return f"{self.kind} {self.index}"

    @property
    def id(self) -> str:
        """Ray's id of the actor, hexadecimal."""
        return actor_id(self.handle)

    def progress(self) -> Progress | None:
        """Return the actor's published progress; ``None`` if its process has not started."""
        return read_progress(self.id)

    def kill(self, restart: bool = False) -> None:
        """End the actor's process, even if it does not answer.

        Args:
            restart: whether Ray restarts the actor, if the actor's options allow it.
        """
        ray.kill(self.handle, no_restart=not restart)


def answering(actors: Sequence[RunActor]) -> list[RunActor]:
    """Return the actors that answer a call within :data:`ANSWER_S`; busy and dead actors do not."""
    ready = answers([actor.handle.__ray_ready__.remote() for actor in actors], ANSWER_S)
    return [actor for actor, answer in zip(actors, ready, strict=True) if answer]


def end_processes(actors: Sequence[RunActor]) -> None:
    """Kill actors without restart, and wait until their processes on this node are gone.

    Ray requests that a process exits, and kills it only later. A process that hangs would survive if the driver exited first.
    """
    if not actors:
        return  # Do not call get_runtime_context(), which would start Ray.
    node = ray.get_runtime_context().get_node_id()
    local = [progress for actor in actors if (progress := actor.progress()) and progress.node == node]
    for actor in actors:
        actor.kill()
        forget(actor.id)
    began = time.monotonic()
    deadline = began + PROCESS_ENDS_S
    while (local := [progress for progress in local if runs_here(progress)]) and time.monotonic() < deadline:
        if time.monotonic() - began > RAY_ENDS_S:
            for progress in local:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(progress.pid, signal.SIGKILL)
        time.sleep(0.05)
    if local:
        logger.warning(
            "the processes %s did not end within %.0f s", sorted(progress.pid for progress in local), PROCESS_ENDS_S
        )
