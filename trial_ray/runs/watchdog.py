"""Watchdog: ends what hangs, and restarts a run after an infrastructure failure."""

from __future__ import annotations

import logging
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trial_ray.algorithms.actors import ENGINE, ENV_RUNNER, LEARNER, RunActor, answering
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
ANSWER_S = 10.0
"""How long an engine may take to answer: its event loop is free even while it computes."""
WAITED_FOR = {"update": (LEARNER,), "sync": (ENGINE, LEARNER)}
"""Kinds of actors that the driver waits for in a phase, those to rule out first before the others."""
WAITED_FOR_WHILE_PLAYING = (ENGINE, ENV_RUNNER)
NO_STACKS = {"state": "unknown", "stacks": "none: its node did not answer in time"}


@dataclass(slots=True)
class WatchedActor:
    """An actor as it was last looked at.

    Attributes:
        actor: itself.
        progress: what it had published.
        changed: when that was seen to change, on the monotonic clock.
        answers: whether it answers a call.
        state: of its process.
        stacks: of its process.
    """

    actor: RunActor
    progress: Progress | None
    changed: float
    answers: bool = False
    state: str = "unknown"
    stacks: str = ""

    @property
    def hangs(self) -> bool:
        """Whether its process can make no progress."""
        return self.state in ("stopped", "gone", "zombie")

    def __str__(self) -> str:
        if self.progress is None:
            return f"{self.actor.name}: its process has not started"
        return (
            f"{self.actor.name}: process {self.progress.pid} on node {self.progress.node[:8]}, {self.state}, "
            f"{'answers' if self.answers else 'does not answer (busy, hung or dead)'}; {self.progress.count} units done, the "
            f"last one seen {time.monotonic() - self.changed:.0f} s ago or more ({self.progress.work})"
        )


@dataclass(eq=False)
class Watchdog:
    """Looks at the progress of every process of a run, from a thread of its own.

    Without any progress for ``timeout_s`` seconds it writes a report, and kills the actors that the driver waits for and that
    hang; the run then replaces them, or restarts from its checkpoint. After the same time again without progress it kills all
    actors of the run, and after that ends the process.

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
        self._seen: list[WatchedActor] = []
        self._counted = -1
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
        last, rounds = time.monotonic(), 0
        while not ended.wait(pause):
            try:
                if self._has_progressed():
                    last, rounds = time.monotonic(), 0
                elif time.monotonic() - last > self.timeout_s:
                    self._act(rounds, ended)
                    last, rounds = time.monotonic(), rounds + 1
            except Exception:  # a watchdog that fails must not fail the run
                logger.exception("the watchdog failed")

    def _has_progressed(self) -> bool:
        now, before = time.monotonic(), {each.actor.id: each for each in self._seen}
        counted, self._counted = self._counted, own_count()
        self._seen = []
        for actor in self.algorithm.actors():
            known, progress = before.get(actor.id), actor.progress()
            if known is None or known.progress != progress:
                known = WatchedActor(actor, progress, now)
            self._seen.append(known)
        return counted != self._counted or any(each.changed == now for each in self._seen)

    def _act(self, rounds: int, ended: threading.Event) -> None:
        seen = self._seen
        own_stacks = _examine(seen)
        phase = self.algorithm.phase
        hung = [_suspects(seen, phase), [each.actor for each in seen], []][min(rounds, 2)]
        decision = (
            f"ending {', '.join(actor.name for actor in hung)}, so that the run goes on without"
            if hung
            else "nothing is left to end: stopping with exit code 1"
        )
        line = f"no progress for {self.timeout_s:g} s ({phase or 'between phases'}); {decision}"
        report = [
            line,
            f"The driver (process {os.getpid()}) waits for: {' or '.join(_waited_for(phase))}, in the phase {phase or 'none'}.",
            *map(str, seen),
            "What to do: a process that is stopped was stopped from outside. For one that runs, its stacks below say where; "
            "if that is slow and right, raise stall_timeout_s, else fix it. "
            "`trial-ray train ... --resume` continues a run that ended.",
            f"\n--- driver, process {os.getpid()}\n{own_stacks}",
            *(f"\n--- {each.actor.name}\n{each.stacks}" for each in seen),
        ]
        path = write_text(self.folder / f"stall-{time.strftime('%Y%m%d-%H%M%S')}.txt", "\n".join(report) + "\n")
        self.tell(f"{line}; who waits for whom: {path}")
        # All this takes up to a minute: a run that makes progress meanwhile does not hang.
        if self._has_progressed() or ended.is_set():
            self.tell("the run went on meanwhile: nothing was ended")
            return
        for actor in hung:
            # Ray restarts env runners automatically.
            actor.kill(restart=actor.kind == ENV_RUNNER)
        if not hung:
            self.give_up(line)


def _waited_for(phase: str) -> tuple[str, ...]:
    return WAITED_FOR.get(phase, WAITED_FOR_WHILE_PLAYING)


def _suspects(seen: Sequence[WatchedActor], phase: str) -> list[RunActor]:
    """Those that the driver waits for and that hang: processes that are stopped, engines that do not answer, else all of the
    last kind that can be meant. Learners wait for each other, so that one that hangs takes all of them along."""
    kinds = _waited_for(phase)
    meant = [each for each in seen if each.actor.kind in kinds]
    hung = (
        [each for each in meant if each.hangs]
        or [each for each in meant if each.actor.kind == ENGINE and not each.answers]
        or [each for each in meant if each.actor.kind == kinds[-1]]
    )
    ended = {each.actor.kind for each in hung} & {LEARNER}
    return [each.actor for each in meant if each in hung or each.actor.kind in ended]


def _examine(seen: Sequence[WatchedActor]) -> str:
    """Find out whether the actors answer, and the state and stacks of their processes, on whatever node; returns the stacks of
    this process. Other nodes have :data:`NODE_S` seconds together: one that hangs holds up none."""
    alive = answering([each.actor for each in seen], ANSWER_S)
    here = ray.get_runtime_context().get_node_id()
    pids: dict[str, list[int]] = {here: [os.getpid()]}
    for progress in (each.progress for each in seen if each.progress is not None):
        pids.setdefault(progress.node, []).append(progress.pid)
    task: Any = ray.remote(describe_processes)  # Ray's annotations know no affinity to a node
    calls = {}
    for node in pids.keys() - {here}:
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        calls[node] = task.options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(pids[node])
    found = {here: describe_processes(pids[here])}
    if calls:
        ray.wait(list(calls.values()), num_returns=len(calls), timeout=NODE_S)
    for node, call in calls.items():
        try:
            found[node] = ray.get(call, timeout=FETCH_S)
        except RayError:
            ray.cancel(call, force=True)
    for each in seen:
        each.answers = each.actor in alive
        if each.progress is not None:
            told = found.get(each.progress.node, {}).get(each.progress.pid, NO_STACKS)
            each.state, each.stacks = told["state"], told["stacks"]
    return str(found[here][os.getpid()]["stacks"])


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
