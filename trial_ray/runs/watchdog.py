"""Watchdog: ends what hangs, and restarts a run after an infrastructure failure."""

from __future__ import annotations

import logging
import os
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trial_ray.algorithms.actors import ENV_RUNNER, LEARNER, RunActor
from trial_ray.errors import (
    EnvironmentFaultError,
    InfrastructureError,
    TrainingDivergedError,
    is_user_error,
    root_cause,
)
from trial_ray.files import write_text
from trial_ray.process_reports import Progress, announce, describe_processes, own_count

if TYPE_CHECKING:
    from trial_ray.algorithms.grpo import GRPO

logger = logging.getLogger(__name__)

LOOKS = 20
"""How often to look at the counts within the time after which a run counts as stalled."""
LONGEST_PAUSE_S = 10.0
NODE_S = 30.0
"""How long other nodes may take to describe their processes."""
FETCH_S = 1.0
"""How long a description that a node has made by then may take to be read."""
ADVICE = """A process that is stopped was stopped from outside. For one that runs, its stacks below say where; if that is slow
and right, raise stall_timeout_s, else fix it. `trial-ray train ... --resume` continues a run that ended."""


@dataclass(eq=False)
class Watchdog:
    """Looks at the progress of every process of a run, from a thread of its own.

    Without any progress for ``timeout_s`` seconds it writes a report and kills the actors that the driver may wait for: the run
    replaces them, or restarts from its checkpoint. After the same time again without progress it ends the process.

    Attributes:
        algorithm: the run's.
        folder: of the reports.
        timeout_s: seconds without progress.
        tell: prints a line.
        give_up: called with the reason when nothing helped, instead of everything else that the run would still do.
    """

    algorithm: GRPO
    folder: Path
    timeout_s: float
    tell: Callable[[str], None]
    give_up: Callable[[str], None]

    def __post_init__(self) -> None:
        self._done: dict[str, int] = {}
        announce()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While entered, stalls are noticed."""
        ended = threading.Event()
        thread = threading.Thread(target=self._watch, args=(ended,), name="watchdog", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(NODE_S)

    def _watch(self, ended: threading.Event) -> None:
        pause = min(self.timeout_s / LOOKS, LONGEST_PAUSE_S)
        last, acted = time.monotonic(), False
        while not ended.wait(pause):
            try:
                if self._has_progressed():
                    last, acted = time.monotonic(), False
                elif time.monotonic() - last > self.timeout_s:
                    self._act(acted, ended)
                    last, acted = time.monotonic(), True
            except Exception:  # a watchdog that fails must not fail the run
                logger.exception("the watchdog failed")

    def _has_progressed(self) -> bool:
        """Whether some process has done more than at the last look; the restart of a killed actor is no progress."""
        published = {actor.id: actor.progress() for actor in self.algorithm.actors()}
        before, self._done = self._done, {name: found.count for name, found in published.items() if found is not None}
        self._done["driver"] = own_count()
        return any(count > before.get(name, 0) for name, count in self._done.items())

    def _act(self, acted: bool, ended: threading.Event) -> None:
        phase, actors = self.algorithm.phase, self.algorithm.actors()
        # Outside of updates and weight syncs no actor waits for learners, which hold state that the others lack.
        hung = [actor for actor in actors if phase in ("update", "sync") or actor.kind != LEARNER]
        names = ", ".join(actor.name for actor in hung)
        decision = "stopping with exit code 1" if acted else f"ending {names}, so that the run goes on without"
        line = f"no progress for {self.timeout_s:g} s ({phase or 'between phases'}); {decision}"
        path = self.folder / f"stall-{time.strftime('%Y%m%d-%H%M%S')}.txt"
        write_text(path, "\n\n--- ".join([f"{line}\n{ADVICE}", *_described(actors)]) + "\n")
        self.tell(f"{line}; stacks of all processes: {path}")
        # All this takes up to a minute: a run that makes progress meanwhile does not hang.
        if self._has_progressed() or ended.is_set():
            self.tell("the run went on meanwhile: nothing was ended")
        elif acted:
            self.give_up(line)
        else:
            for actor in hung:
                # Ray restarts env runners automatically.
                actor.kill(restart=actor.kind == ENV_RUNNER)


def _described(actors: Sequence[RunActor]) -> list[str]:
    """Of the driver and of each actor, on whatever node: its process, its progress, state and stacks.

    Other nodes have :data:`NODE_S` seconds together: one that hangs holds up none.
    """
    here = ray.get_runtime_context().get_node_id()
    published = {actor.name: actor.progress() for actor in actors}
    driver = Progress(here, os.getpid(), own_count(), "driver")
    processes = {"driver": driver, **{name: found for name, found in published.items() if found is not None}}
    pids: dict[str, list[int]] = defaultdict(list)
    for process in processes.values():
        pids[process.node].append(process.pid)
    task: Any = ray.remote(describe_processes)  # Ray's annotations know no affinity to a node
    calls = {}
    for node in pids.keys() - {here}:
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        calls[node] = task.options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(pids[node])
    told = {(here, pid): text for pid, text in describe_processes(pids[here]).items()}
    if calls:
        ray.wait(list(calls.values()), num_returns=len(calls), timeout=NODE_S)
    for node, call in calls.items():
        try:
            told |= {(node, pid): text for pid, text in ray.get(call, timeout=FETCH_S).items()}
        except RayError:
            ray.cancel(call, force=True)
    missing = "no stacks: its node did not answer in time"
    described = [
        f"{name}: process {each.pid} on node {each.node[:8]}, {each.count} units done, the last a {each.work}\n"
        f"{told.get((each.node, each.pid), missing)}"
        for name, each in processes.items()
    ]
    return described + [f"{name}: its process has not started" for name in published.keys() - processes.keys()]


def is_recoverable(error: Exception) -> bool:
    """Whether new actors may do what these could not: a process, a node or a transfer failed.

    What the input, an environment, the numbers or this package's own code did wrong would come again.
    """
    cause = root_cause(error)
    if is_user_error(error) or isinstance(cause, TrainingDivergedError | EnvironmentFaultError):
        return False
    return isinstance(cause, InfrastructureError) or (
        isinstance(error, RayError) and not isinstance(error, RayTaskError)
    )


def record_restart(folder: Path, line: str, error: Exception) -> Path:
    """Keep in ``folder`` why a run began again: the line that was printed, and the traceback."""
    number = len(list(folder.glob("restart-*.log"))) + 1
    return write_text(folder / f"restart-{number}.log", f"{line}\n\n{''.join(traceback.format_exception(error))}")
