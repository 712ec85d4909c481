"""A simulated engine, which batches requests between two steps as the real ones do, and the cores that actors share."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable

import simpy

from trial_ray.engines.transformers import JOINING_SHARE, MOST_STEPS_WAITED
from trial_ray.planning.rates import EngineRates

LEFT_BY_URGENT = 0.1
"""Share of the cores that others have beside urgent work that keeps all of them busy. An assumption."""


class Work:
    """Something that computes; ``then`` is called at its end, and ``None`` once it was cancelled."""

    __slots__ = ("end", "queue", "then", "threads")

    def __init__(self, end: float, then: Callable[[], None], threads: int, queue: _Queue) -> None:
        self.end, self.threads, self.queue = end, threads, queue
        self.then: Callable[[], None] | None = then


class _Queue:
    """Works of one priority, by their ends; ``progress`` is what a thread that never paused would have computed, in seconds."""

    __slots__ = ("busy", "progress", "speed", "works")

    def __init__(self) -> None:
        self.works: list[tuple[float, int, Work]] = []
        self.busy, self.progress, self.speed = 0, 0.0, 1.0

    def share(self, cores: float) -> float:
        """Compute on so many cores, all threads alike; returns how many they use."""
        self.speed = min(1.0, cores / self.busy) if self.busy else 1.0
        return self.busy * self.speed

    def first_end(self) -> float:
        """Seconds until the first of them ends at the present speed."""
        while self.works and self.works[0][2].then is None:
            heapq.heappop(self.works)
        return max(0.0, (self.works[0][0] - self.progress) / self.speed) if self.works else math.inf


class Cores:
    """Cores that are shared: while more threads are busy than there are cores, all of them are slowed alike.

    Urgent work, of a process of higher priority, has them first.

    Args:
        env: SimPy's.
        number: of cores; infinite: nothing is slowed.
    """

    def __init__(self, env: simpy.Environment, number: float = math.inf) -> None:
        self.env = env
        self._number = number
        self._since = 0.0
        self._urgent, self._others = _Queue(), _Queue()
        self._numbers = itertools.count()
        self._alarm = 0

    @property
    def progress(self) -> float:
        """Seconds that a thread which never paused, of no urgent work, would have computed at full speed."""
        now = float(self.env.now)
        if self._number == math.inf:
            return now
        for queue in (self._urgent, self._others):
            queue.progress += (now - self._since) * queue.speed
        self._since = now
        return self._others.progress

    def compute(self, seconds: float, then: Callable[[], None], threads: int = 1, urgent: bool = False) -> Work:
        """Compute for so many seconds at full speed, and call ``then``."""
        _ = self.progress
        queue = self._urgent if urgent else self._others
        work = Work(queue.progress + seconds, then, threads, queue)
        if self._number == math.inf:  # nothing is ever slowed, so that its end is known
            self.env.timeout(seconds).callbacks.append(lambda _: self._end(work))
            return work
        heapq.heappush(queue.works, (work.end, next(self._numbers), work))
        queue.busy += threads
        self._set_alarm()
        return work

    def cancel(self, work: Work) -> None:
        """Stop computing; ``then`` is not called."""
        _ = self.progress
        if work.then is not None:
            work.then = None
            if self._number != math.inf:
                work.queue.busy -= work.threads
                self._set_alarm()

    @staticmethod
    def _end(work: Work) -> None:
        then, work.then = work.then, None
        if then is not None:
            then()

    def _set_alarm(self) -> None:
        used = self._urgent.share(self._number)
        self._others.share(max(self._number - used, LEFT_BY_URGENT * self._number))
        self._alarm += 1
        alarm, queue = self._alarm, min((self._urgent, self._others), key=_Queue.first_end)
        if (delay := queue.first_end()) < math.inf:
            self.env.timeout(delay).callbacks.append(lambda _: self._ring(alarm, queue))

    def _ring(self, alarm: int, queue: _Queue) -> None:
        if alarm != self._alarm:
            return
        _ = self.progress
        # The first in the queue has ended by construction, whatever rounding says.
        ended = [heapq.heappop(queue.works)[2]]
        queue.progress = max(queue.progress, ended[0].end)
        while queue.works and (queue.works[0][0] <= queue.progress or queue.works[0][2].then is None):
            ended.append(heapq.heappop(queue.works)[2])
        calls = [work.then for work in ended if work.then is not None]
        for work in ended:
            if work.then is not None:
                queue.busy -= work.threads
                work.then = None
        self._set_alarm()
        for call in calls:
            call()


class SimulatedEngine:
    """Decodes requests together; several steps without a request that joins or ends are one event.

    A request joins in a step that computes its prompt and its first token, and leaves with its last one.

    Args:
        cores: on which it computes, with one thread.
        rates: its speed.
    """

    def __init__(self, cores: Cores, rates: EngineRates) -> None:
        self._cores, self._rates = cores, rates
        self._waiting: deque[tuple[int, int, simpy.Event]] = deque()
        self._rows: list[tuple[int, int, simpy.Event]] = []  # a heap by the step after which each ends
        self._numbers = itertools.count()
        self._step = 0
        self._steps_waited = 0
        self._work: Work | None = None
        self._began, self._steps, self._step_s = 0.0, 0, 0.0
        self._joining: list[tuple[int, int, simpy.Event]] = []
        self._drained: simpy.Event | None = None
        self._busy_since: float | None = None
        self._busy_s = 0.0
        self.alive = True

    @property
    def busy_s(self) -> float:
        """Seconds so far in which it had a request."""
        now = float(self._cores.env.now)
        return self._busy_s + (0.0 if self._busy_since is None else now - self._busy_since)

    def ask(self, prompt_tokens: int, response_tokens: int) -> simpy.Event:
        """A request; the event's value is whether it was answered, ``False`` where the engine is or gets lost."""
        answered = self._cores.env.event()
        if not self.alive:
            return answered.succeed(False)
        self._waiting.append((prompt_tokens, response_tokens, answered))
        if self._work is None:
            self._next_steps()
        elif self._steps > 1 and self._drained is None:
            self._shorten()
        return answered

    def hold(self) -> simpy.Event:
        """Admit no request, as before weights change; the event happens once those under way have ended."""
        self._drained = self._cores.env.event()
        if self._work is None:
            self._drained.succeed()
        return self._drained

    def release(self) -> None:
        """Serve again."""
        self._drained = None
        if self.alive and self._work is None:
            self._next_steps()

    def lose(self) -> None:
        """End, with all requests."""
        self.alive = False
        if self._work is not None:
            self._cores.cancel(self._work)
        lost = [*self._waiting, *self._rows, *self._joining]
        self._waiting.clear()
        self._rows, self._joining = [], []
        self._idle()
        for *_, answered in lost:
            answered.succeed(False)

    def restore(self) -> None:
        """Serve again after :meth:`lose`."""
        self.alive = True

    def _next_steps(self) -> None:
        """Between two steps: let requests join, and compute until something changes."""
        rates = self._rates
        self._joining = self._take_waiting()
        rows = min(len(self._rows) + len(self._waiting) + len(self._joining), rates.most_rows)
        if self._joining:
            prompt_tokens = sum(prompt for prompt, _, _ in self._joining)
            self._compute(1, rates.step_s(rows) + rates.prefill_s(prompt_tokens))
        elif self._rows:
            steps = self._rows[0][0] - self._step
            if self._waiting and self._drained is None and len(self._rows) < rates.most_rows:
                steps = min(steps, max(1, MOST_STEPS_WAITED - self._steps_waited))
            self._compute(steps, rates.step_s(rows))
        else:
            self._idle()

    def _take_waiting(self) -> list[tuple[int, int, simpy.Event]]:
        room = self._rates.most_rows - len(self._rows)
        few = self._rates.joins_late and len(self._waiting) < JOINING_SHARE * len(self._rows)
        if self._drained is not None or room <= 0 or (few and self._steps_waited < MOST_STEPS_WAITED):
            return []
        self._steps_waited = 0
        return [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]

    def _compute(self, steps: int, step_s: float) -> None:
        if self._busy_since is None:
            self._busy_since = float(self._cores.env.now)
        self._began, self._steps, self._step_s = self._cores.progress, steps, step_s
        self._work = self._cores.compute(steps * step_s, self._end_steps)

    def _shorten(self) -> None:
        """End after the present step, so that a request that has come may join."""
        assert self._work is not None
        elapsed = self._cores.progress - self._began
        steps = math.floor(elapsed / self._step_s) + 1 if self._step_s else self._steps
        if len(self._waiting) == 1:
            self._steps_waited = -min(steps, self._steps)  # the steps until now are not waited for
        if steps < self._steps:
            self._cores.cancel(self._work)
            self._steps = steps
            self._work = self._cores.compute(max(0.0, steps * self._step_s - elapsed), self._end_steps)

    def _end_steps(self) -> None:
        self._step += self._steps
        if self._waiting:
            self._steps_waited += self._steps
        for _, response_tokens, answered in self._joining:
            heapq.heappush(self._rows, (self._step + response_tokens - 1, next(self._numbers), answered))
        self._joining = []
        while self._rows and self._rows[0][0] <= self._step:
            heapq.heappop(self._rows)[2].succeed(True)
        self._next_steps()

    def _idle(self) -> None:
        self._work = None
        if self._busy_since is not None:
            self._busy_s += float(self._cores.env.now) - self._busy_since
            self._busy_since = None
        if self._drained is not None and not self._drained.triggered:
            self._drained.succeed()
