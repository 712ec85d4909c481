"""The actors of a run: their names, their progress and their end."""

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
from ray.exceptions import RayError

from trial_ray.process import Progress, forget, read_progress, runs_here
from trial_ray.ray_internals import actor_id

logger = logging.getLogger(__name__)

ENV_RUNNER, ENGINE, LEARNER = "env runner", "engine", "learner"
ANSWER_S = 5.0
"""How long an actor may take to answer that is asked to stop; one that hangs is killed after it."""
BY_ITSELF_S = 2.0
"""How long Ray is left to end the process of a killed actor."""
GONE_S = 10.0
"""How long the process of a killed actor may take to disappear."""


@dataclass(frozen=True, slots=True)
class RunActor:
    """One actor of a run.

    Attributes:
        kind: :data:`ENV_RUNNER`, :data:`ENGINE` or :data:`LEARNER`.
        index: among those of its kind.
        handle: of the actor.
    """

    kind: str
    index: int
    handle: Any

    @property
    def name(self) -> str:
        """For a person to read."""
        return f"{self.kind} {self.index}"

    @property
    def id(self) -> str:
        """Ray's, hexadecimal."""
        return actor_id(self.handle)

    def progress(self) -> Progress | None:
        """Its published progress; ``None`` where its process did not start."""
        return read_progress(self.id)

    def kill(self, restart: bool = False) -> None:
        """End its process, also one that does not answer; with ``restart`` Ray starts another where its options say so."""
        ray.kill(self.handle, no_restart=not restart)


def answering(actors: Sequence[RunActor], timeout_s: float) -> list[RunActor]:
    """Actors that answer a call; busy and dead ones do not."""
    calls = {actor.handle.__ray_ready__.remote(): actor for actor in actors}
    if not calls:
        return []
    ready, _ = ray.wait(list(calls), num_returns=len(calls), timeout=timeout_s)
    found = []
    for call in ready:
        with contextlib.suppress(RayError):
            ray.get(call)
            found.append(calls[call])
    return found


def end_processes(actors: Sequence[RunActor]) -> None:
    """Kill actors for good, and wait until those of their processes that run on this node are gone.

    Ray asks a process to end before it kills it; one that is stopped would be left behind by a driver that exits first.
    """
    if not actors:
        return  # what follows would start Ray where there is none
    node = ray.get_runtime_context().get_node_id()
    local = [progress for actor in actors if (progress := actor.progress()) and progress.node == node]
    for actor in actors:
        actor.kill()
        forget(actor.id)
    began = time.monotonic()
    while (local := [progress for progress in local if runs_here(progress)]) and time.monotonic() - began < GONE_S:
        if time.monotonic() - began > BY_ITSELF_S:
            for progress in local:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(progress.pid, signal.SIGKILL)
        time.sleep(0.05)
    if local:
        logger.warning("the processes %s did not end within %.0f s", sorted(progress.pid for progress in local), GONE_S)
