"""Watchdog: ends what hangs, and restarts a run after an infrastructure failure."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
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
from trial_ray.process_reports import Progress, describe_processes, own_count

if TYPE_CHECKING:
    from trial_ray.algorithms.grpo import GRPO

logger = logging.getLogger(__name__)

LOOKS = 20
"""How often to look at the counts within the time after which a run counts as stalled."""
LONGEST_PAUSE_S = 10.0
NODE_S = 30.0
"""How long other nodes may take to tell about their processes."""
FETCH_S = 1.0
"""How long what a node has told by then may take to be read."""
ANSWER_S = 10.0
"""How long an engine may take to answer: its event loop is free even while it computes."""
WAITED_FOR = {"update": (LEARNER,), "sync": (ENGINE, LEARNER)}
"""Kinds of actors that the driver waits for in a phase, those that are to be ruled out first before the others."""
WAITED_FOR_WHILE_PLAYING = (ENGINE, ENV_RUNNER)


@dataclass(slots=True)
class _Seen:
    """What an actor was when it was last looked at.

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
        """Whether its process cannot be what makes progress."""
        return self.state in ("stopped", "gone", "zombie")


class StallWatch:
    """Looks at what every process of a run has done, from a thread of its own.

    Without any progress for ``timeout_s`` seconds it writes a report, and kills the actors that the driver waits for and that
    hang; what replaces dead actors, or begins the run again from its checkpoint, then goes on. If that brings no progress
    for as long again, it kills all actors of the run, and after that ends the process.

    Args:
        algorithm: the run's.
        folder: of the reports.
        timeout_s: seconds without progress.
        tell: prints a line.
        give_up: called with the reason when nothing helped, instead of everything else that the run would still do.
    """

    def __init__(
        self,
        algorithm: GRPO,
        folder: Path,
        timeout_s: float,
        tell: Callable[[str], None],
        give_up: Callable[[str], None],
    ) -> None:
        self._algorithm = algorithm
        self._folder = folder
        self._timeout_s = timeout_s
        self._tell = tell
        self._give_up = give_up
        self._seen: dict[str, _Seen] = {}
        self._counted = -1

    def watching(self) -> AbstractContextManager[None]:
        """While entered, stalls are noticed."""
        return _Thread(self._watch)

    def _watch(self, ended: threading.Event) -> None:
        pause = min(self._timeout_s / LOOKS, LONGEST_PAUSE_S)
        last, rounds = time.monotonic(), 0
        while not ended.wait(pause):
            try:
                if self._has_progressed():
                    last, rounds = time.monotonic(), 0
                elif time.monotonic() - last > self._timeout_s:
                    self._act(rounds, ended)
                    last, rounds = time.monotonic(), rounds + 1
            except Exception:  # a watch that fails must not fail the run
                logger.exception("the watch over the run's progress failed")

    def _has_progressed(self) -> bool:
        now, before = time.monotonic(), self._seen
        self._seen, progressed = {}, own_count() != self._counted
        self._counted = own_count()
        for actor in self._algorithm.actors():
            progress = actor.progress()
            known = before.get(actor.id)
            changed = known is None or known.progress != progress
            progressed |= changed
            self._seen[actor.id] = _Seen(actor, progress, now if known is None or changed else known.changed)
        return progressed

    def _act(self, rounds: int, ended: threading.Event) -> None:
        seen = list(self._seen.values())
        _examine(seen)
        phase = self._algorithm.phase
        hung = _suspects(seen, phase) if not rounds else [each.actor for each in seen]
        if rounds > 1:
            hung = []
        what = (
            f"ending {', '.join(actor.name for actor in hung)}, so that the run goes on without"
            if hung
            else "nothing is left to end: stopping with exit code 1"
        )
        line = f"no progress for {self._timeout_s:g} s ({phase or 'between phases'}); {what}"
        path = self._write(line, seen, phase)
        self._tell(f"{line}; who waits for whom: {path}")
        # To find all this out takes up to a minute: what goes on meanwhile does not hang.
        if self._has_progressed() or ended.is_set():
            self._tell("the run went on meanwhile: nothing was ended")
            return
        for actor in hung:
            # Ray starts env runners again by itself.
            actor.kill(restart=actor.kind == ENV_RUNNER)
        if not hung:
            self._give_up(line)

    def _write(self, line: str, seen: list[_Seen], phase: str) -> Path:
        path = self._folder / f"stall-{time.strftime('%Y%m%d-%H%M%S')}.txt"
        waited_for = WAITED_FOR.get(phase, WAITED_FOR_WHILE_PLAYING)
        parts = [
            line,
            f"The driver (process {os.getpid()}) waits for: {' or '.join(waited_for)}, in the phase {phase or 'none'}.",
            *(_describe(each) for each in seen),
            "What to do: a process that is stopped was stopped from outside. For one that runs, its stacks below say where; "
            "if that is slow and right, raise stall_timeout_s, else mend it. "
            "`trial-ray train ... --resume` continues a run that ended.",
            f"\n--- driver, process {os.getpid()}\n{_own_stacks()}",
            *(f"\n--- {each.actor.name}\n{each.stacks}" for each in seen),
        ]
        path.parent.mkdir(parents=True, exist_ok=True)
        return write_text(path, "\n".join(parts) + "\n")


class _Thread(AbstractContextManager[None]):
    def __init__(self, watch: Callable[[threading.Event], None]) -> None:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=watch, args=(self._ended,), name="stall watch", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(NODE_S)


def _suspects(seen: list[_Seen], phase: str) -> list[RunActor]:
    """Those that the driver waits for and that hang: processes that are stopped, engines that do not answer, else all of the
    last kind that can be meant. Learners wait for each other, so that one that hangs takes all of them along."""
    kinds = WAITED_FOR.get(phase, WAITED_FOR_WHILE_PLAYING)
    meant = [each for each in seen if each.actor.kind in kinds]
    hung = [each for each in meant if each.hangs] or [
        each for each in meant if each.actor.kind == ENGINE and not each.answers
    ]
    hung = hung or [each for each in meant if each.actor.kind == kinds[-1]]
    if any(each.actor.kind == LEARNER for each in hung):
        hung = [each for each in meant if each in hung or each.actor.kind == LEARNER]
    return [each.actor for each in hung]


def _examine(seen: list[_Seen]) -> None:
    """Find out whether the actors answer, and the state and the stacks of their processes, on whatever node they are."""
    alive = answering([each.actor for each in seen], ANSWER_S)
    pids: dict[str, list[int]] = {}
    for progress in (each.progress for each in seen if each.progress is not None):
        pids.setdefault(progress.node, []).append(progress.pid)
    found = _processes(pids)
    for each in seen:
        each.answers = each.actor in alive
        if each.progress is not None and (told := found[each.progress.node].get(each.progress.pid)):
            each.state, each.stacks = told["state"], told["stacks"]


def _processes(pids: dict[str, list[int]]) -> dict[str, dict[int, dict[str, Any]]]:
    """State and stacks of processes by node; other nodes have :data:`NODE_S` seconds together: one that hangs holds up none."""
    here = ray.get_runtime_context().get_node_id()
    task: Any = ray.remote(describe_processes)  # Ray's annotations know no affinity to a node
    calls = {}
    for node in pids.keys() - {here}:
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        calls[node] = task.options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(pids[node])
    found = {here: describe_processes(pids.get(here, []))}
    if calls:
        ray.wait(list(calls.values()), num_returns=len(calls), timeout=NODE_S)
    for node, call in calls.items():
        try:
            found[node] = ray.get(call, timeout=FETCH_S)
        except RayError as error:
            told = f"none: its node did not tell within {NODE_S:.0f} s ({error})"
            found[node] = {pid: {"state": "unknown", "stacks": told} for pid in pids[node]}
            ray.cancel(call, force=True)
    return found


def _describe(each: _Seen) -> str:
    if each.progress is None:
        return f"{each.actor.name}: its process has not started"
    seconds = time.monotonic() - each.changed
    return (
        f"{each.actor.name}: process {each.progress.pid} on node {each.progress.node[:8]}, {each.state}, "
        f"{'answers' if each.answers else 'does not answer (busy, hung or dead)'}; "
        f"{each.progress.count} units done, the last one seen {seconds:.0f} s ago or more ({each.progress.work})"
    )


def _own_stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )


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


def first_line(error: Exception) -> str:
    """What an error says, in a line."""
    cause = root_cause(error)
    return (str(cause).strip() or type(cause).__name__).splitlines()[0].rstrip(".")


def record_restart(folder: Path, line: str, error: Exception) -> Path:
    """Keep in ``folder`` why a run began again: the line that was printed, and the traceback."""
    number = len(list(folder.glob("restart-*.log"))) + 1
    return write_text(folder / f"restart-{number}.log", f"{line}\n\n{''.join(traceback.format_exception(error))}")
