"""Iterations of a run as a discrete-event simulation: env runners, engines, learners and the driver between them.

The driver and rollouts are processes of SimPy that wait for what the actors here would compute. No Ray, no model, no clock: the
same arguments give the same result.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any, Literal

import simpy

from trial_ray.errors import ConfigError
from trial_ray.planning.engine_queue import Cores, SimulatedEngine
from trial_ray.planning.rates import Arrangement, Rates, Rollout, Workload, update_seconds

Waiting = Generator[simpy.Event, Any, None]
LossKind = Literal["engine", "env runner"]


@dataclass(frozen=True, slots=True)
class Loss:
    """An actor that is lost.

    Attributes:
        at_s: when, in seconds.
        kind: of actor.
        index: of the actor.
        seconds: after which another is in its place.
    """

    at_s: float
    kind: LossKind
    index: int
    seconds: float


@dataclass(frozen=True, slots=True)
class SimulatedIteration:
    """An iteration; names as in ``metrics.jsonl`` and ``cost.json``.

    Attributes:
        sampling, update, sync, other: seconds by phase of the driver.
        scoring: seconds of ``update`` without gradients.
        engines_busy, learners_busy, env_runners_busy: mean share of the iteration in which one computed.
        staleness: mean over trained turns of how many versions older the weights were that sampled them.
        groups: trained.
        episodes, turns, tokens: of these groups.
    """

    sampling: float
    update: float
    sync: float
    other: float
    scoring: float
    engines_busy: float
    learners_busy: float
    env_runners_busy: float
    staleness: float
    groups: int
    episodes: int
    turns: int
    tokens: int

    @property
    def seconds(self) -> float:
        """Of the whole iteration."""
        return self.sampling + self.update + self.sync + self.other


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """What was simulated.

    Attributes:
        iterations: in order.
        groups_started: those started again included.
        groups_trained: that entered an update.
        groups_lost: with the env runners that played them; they were started again.
        groups_in_flight: when the last iteration ended.
        requests_repeated: turns that an engine's loss made another engine sample.
    """

    iterations: Sequence[SimulatedIteration]
    groups_started: int
    groups_trained: int
    groups_lost: int
    groups_in_flight: int
    requests_repeated: int


class _Runner:
    """An env runner: one thread for its environments and prompts, and a limit on rollouts at a time."""

    def __init__(self, cores: Cores, turn_s: float, slots: int) -> None:
        self._cores, self._turn_s, self._slots = cores, turn_s, slots
        self._queue: deque[simpy.Event] = deque()
        self._pending: deque[Callable[[], None]] = deque()
        self.groups: set[_Group] = set()
        self.engines: Counter[int] = Counter()
        self.busy_s = 0.0
        self._busy_since = 0.0
        self.alive = True

    def turn(self) -> simpy.Event:
        """A step of an environment, after those that were asked for before."""
        done = self._cores.env.event()
        self._queue.append(done)
        if len(self._queue) == 1:
            self._busy_since = float(self._cores.env.now)
            self._cores.compute(self._turn_s, self._next)
        return done

    def _next(self) -> None:
        self._queue.popleft().succeed()
        if self._queue:
            self._cores.compute(self._turn_s, self._next)
        else:
            self.busy_s += float(self._cores.env.now) - self._busy_since

    def admit(self, begin: Callable[[], None]) -> None:
        """Begin a rollout, now or when another ends."""
        self._pending.append(begin)
        if self._slots:
            self.end(0)

    def end(self, freed: int = 1) -> None:
        """A rollout has ended."""
        self._slots += freed
        while self._slots and self._pending:
            self._slots -= 1
            self._pending.popleft()()


class _Group:
    """A group of rollouts in flight, with the sum of the versions that sampled its turns."""

    def __init__(self, index: int, rollouts: Sequence[Rollout], version: int, runner: _Runner) -> None:
        self.index, self.rollouts, self.version, self.runner = index, rollouts, version, runner
        self.unfinished = len(rollouts)
        self.versions = 0
        self.lost = False

    @property
    def turns(self) -> int:
        return sum(map(len, self.rollouts))


class Simulation:
    """A run that is simulated; see :func:`simulate` for the arguments."""

    def __init__(
        self, workload: Workload, arrangement: Arrangement, rates: Rates, seed: int, losses: Sequence[Loss] = ()
    ) -> None:
        self.env = simpy.Environment()
        self._workload, self._arrangement, self._rates = workload, arrangement, rates
        self._random = Random(seed)
        self._deck: list[Sequence[Rollout]] = []
        self._cores = Cores(self.env, arrangement.cores)
        slow = [1 + abs(self._random.gauss(0, arrangement.deviation)) for _ in range(arrangement.engines)]
        self._engines = [SimulatedEngine(self._cores, rates.engine.times(factor)) for factor in slow]
        # All learners wait for the slowest.
        self._learner_slowness = max(
            1 + abs(self._random.gauss(0, arrangement.deviation)) for _ in range(arrangement.learners)
        )
        self._runners = [
            _Runner(self._cores, rates.turn_s, arrangement.episodes_in_flight) for _ in range(arrangement.env_runners)
        ]
        self._begun: dict[int, _Group] = {}
        self._finished: set[int] = set()
        self._again: list[Sequence[Rollout]] = []
        self._changed = self.env.event()
        self._restored = self.env.event()
        self._version = 0
        self._counts: Counter[str] = Counter()
        self.iterations: list[SimulatedIteration] = []
        for loss in losses:
            self.env.process(self._lose(loss))

    def run(self, iterations: int) -> SimulatedRun:
        """Simulate so many iterations."""
        self.env.run(self.env.process(self._drive(iterations)))
        in_flight = len(self._begun)
        names = ("groups_started", "groups_trained", "groups_lost")
        counts = {name: self._counts[name] for name in names}
        return SimulatedRun(
            self.iterations, **counts, groups_in_flight=in_flight, requests_repeated=self._counts["repeated"]
        )

    # -- the driver ------------------------------------------------------------------------------------------------

    def _drive(self, iterations: int) -> Waiting:
        rates, arrangement = self._rates, self._arrangement
        for _ in range(iterations):
            times, busy = [float(self.env.now)], self._busy()
            yield from self._sample()
            groups = self._take()
            times.append(float(self.env.now))
            rows = sum(group.turns for group in groups)
            tokens = sum(map(sum, (turn for group in groups for rollout in group.rollouts for turn in rollout)))
            scoring, steps = update_seconds(arrangement, rates, rows, tokens)
            yield self._compute((scoring + steps) * self._learner_slowness)
            times.append(float(self.env.now))
            yield self.env.all_of([engine.hold() for engine in self._engines if engine.alive])
            yield self.env.timeout(rates.sync_s)
            self._version += 1
            for engine in self._engines:
                engine.release()
            times.append(float(self.env.now))
            yield self.env.timeout(rates.other_s)
            times.append(float(self.env.now))
            self._note(times, busy, groups, scoring / (scoring + steps) if rows else 0.0, rows, tokens)

    def _note(
        self,
        times: Sequence[float],
        busy: Sequence[float],
        groups: Sequence[_Group],
        scoring_share: float,
        rows: int,
        tokens: int,
    ) -> None:
        sampling, update, sync, other = (end - begin for begin, end in pairwise(times))
        seconds = times[-1] - times[0]
        engines, runners = (now - before for now, before in zip(self._busy(), busy, strict=True))
        # The update was the last but one version's: ``_version`` is counted up with its weights.
        stale = sum(group.turns * (self._version - 1) - group.versions for group in groups)
        self.iterations.append(
            SimulatedIteration(
                sampling,
                update,
                sync,
                other,
                scoring=scoring_share * update,
                engines_busy=engines / len(self._engines) / seconds if seconds else 0.0,
                learners_busy=update / seconds if seconds else 0.0,
                env_runners_busy=runners / len(self._runners) / seconds if seconds else 0.0,
                staleness=stale / rows if rows else 0.0,
                groups=len(groups),
                episodes=sum(len(group.rollouts) for group in groups),
                turns=rows,
                tokens=tokens,
            )
        )

    def _busy(self) -> tuple[float, float]:
        return sum(engine.busy_s for engine in self._engines), sum(runner.busy_s for runner in self._runners)

    def _compute(self, seconds: float) -> simpy.Event:
        """The learners' work, of so many seconds of a thread each, on the cores that they share with the others."""
        done, each = self.env.event(), self._arrangement.learner_threads
        threads, urgent = self._arrangement.learners * each, self._arrangement.learner_in_driver
        self._cores.compute(seconds / each, lambda: self._succeed(done), threads, urgent)
        return done

    @staticmethod
    def _succeed(event: simpy.Event) -> None:
        event.succeed()

    def _sample(self) -> Waiting:
        """Begin groups until enough are in flight, and wait until an update may take some (``OverlappingSampler``)."""
        tasks = self._arrangement.tasks
        for _ in range(tasks * (1 + self._arrangement.max_staleness) - len(self._begun) - len(self._again)):
            self._begin(self._draw())
        while True:
            if self._arrangement.max_staleness or not self._unfinished():
                again, self._again = self._again, []
                for rollouts in again:
                    self._begin(rollouts)
            if self._can_update():
                return
            self._changed = self.env.event()
            yield self._changed

    def _draw(self) -> Sequence[Rollout]:
        """A group of the workload, each once before any comes again; rollouts drawn from it where it has another size."""
        if not self._deck:
            self._deck = list(self._workload.groups)
            self._random.shuffle(self._deck)
        group, size = self._deck.pop(), self._arrangement.group_size
        return group if len(group) == size else self._random.choices(group, k=size)

    def _unfinished(self) -> list[_Group]:
        return [group for index, group in self._begun.items() if index not in self._finished]

    def _can_update(self) -> bool:
        tasks, most = self._arrangement.tasks, self._arrangement.max_staleness
        if self._again or len(self._finished) < tasks:
            return False
        left = [group.version + most - self._version for group in self._unfinished()]
        return all(sum(each <= updates for each in left) <= tasks * updates for updates in range(most))

    def _take(self) -> list[_Group]:
        """The groups of an update: the oldest that are finished."""
        oldest = sorted(self._finished, key=lambda index: (self._begun[index].version, index))
        taken = [self._begun.pop(index) for index in oldest[: self._arrangement.tasks]]
        self._finished -= {group.index for group in taken}
        self._counts["groups_trained"] += len(taken)
        return taken

    # -- rollouts --------------------------------------------------------------------------------------------------

    def _begin(self, rollouts: Sequence[Rollout]) -> None:
        """Give a group to the living env runner that has the fewest."""
        alive = [runner for runner in self._runners if runner.alive]
        if not alive:
            self._again.append(rollouts)
            return
        index = self._counts["groups_started"]
        self._counts["groups_started"] += 1
        group = _Group(index, rollouts, self._version, min(alive, key=lambda runner: len(runner.groups)))
        self._begun[index] = group
        group.runner.groups.add(group)
        engine = self._engine_for(group)
        for rollout in rollouts:

            def begin(rollout: Rollout = rollout) -> None:
                self.env.process(self._play(group, rollout, engine))

            group.runner.admit(begin)

    def _engine_for(self, group: _Group) -> int:
        """As ``EngineClient`` chooses: from the group's number on, the first engine with the fewest groups of this env runner."""
        counts, number = group.runner.engines, len(self._engines)
        least = min(counts.values()) if len(counts) >= number else 0
        engine = next(
            each for each in ((group.index + offset) % number for offset in range(number)) if counts[each] == least
        )
        counts[engine] += 1
        return engine

    def _play(self, group: _Group, rollout: Rollout, engine: int) -> Waiting:
        for prompt, response in rollout:
            yield group.runner.turn()
            if self._rates.environment_s:
                yield self.env.timeout(self._rates.environment_s)
            while not (yield self._engines[engine].ask(prompt, response)):
                if group.lost:
                    return
                self._counts["repeated"] += 1
                engine = yield from self._living_engine(engine)
            if group.lost:
                return
            group.versions += self._version
        yield group.runner.turn()
        if group.lost:
            return
        group.runner.end()
        group.unfinished -= 1
        if not group.unfinished:
            self._end(group, engine)

    def _living_engine(self, lost: int) -> Generator[simpy.Event, Any, int]:
        number = len(self._engines)
        while True:
            for offset in range(number):
                if self._engines[(lost + offset) % number].alive:
                    return (lost + offset) % number
            yield self._restored

    def _end(self, group: _Group, engine: int) -> None:
        group.runner.groups.discard(group)
        group.runner.engines[engine] -= 1
        self._finished.add(group.index)
        self._note_change()

    def _note_change(self) -> None:
        if not self._changed.triggered:
            self._changed.succeed()

    # -- losses ----------------------------------------------------------------------------------------------------

    def _lose(self, loss: Loss) -> Waiting:
        yield self.env.timeout(loss.at_s)
        if loss.kind == "engine":
            engine = self._engines[loss.index]
            engine.lose()
            yield self.env.timeout(loss.seconds)
            engine.restore()
            self._restored.succeed()
            self._restored = self.env.event()
        else:
            runner = self._runners[loss.index]
            runner.alive = False
            for group in runner.groups:
                group.lost = True
                del self._begun[group.index]
                self._again.append(group.rollouts)
                self._counts["groups_lost"] += 1
            runner.groups = set()
            self._note_change()
            yield self.env.timeout(loss.seconds)
            slots = self._arrangement.episodes_in_flight
            self._runners[loss.index] = _Runner(self._cores, self._rates.turn_s, slots)
            self._runners[loss.index].busy_s = runner.busy_s
        self._note_change()


def simulate(
    workload: Workload,
    arrangement: Arrangement,
    rates: Rates,
    iterations: int,
    seed: int = 0,
    losses: Sequence[Loss] = (),
) -> SimulatedRun:
    """Simulate iterations of a run.

    Args:
        workload: lengths of rollouts.
        arrangement: actors and work.
        rates: speeds.
        iterations: at least 1.
        seed: fixes the lengths that are drawn, and which actors are slow.
        losses: of actors.

    Raises:
        ConfigError: an arrangement that could not run.
    """
    counts = {
        name: getattr(arrangement, name) for name in ("tasks", "group_size", "engines", "env_runners", "learners")
    }
    if wrong := [f"{name}={value}" for name, value in {**counts, "iterations": iterations}.items() if value < 1]:
        raise ConfigError(f"{', '.join(wrong)} found; at least 1 of each is needed to simulate a run.")
    if not workload.groups or not all(turns for group in workload.groups for turns in group):
        raise ConfigError("The lengths of rollouts hold a group or a rollout without turns; leave these out.")
    if arrangement.colocate and arrangement.max_staleness:
        raise ConfigError("Engines that share the learners' devices sleep in the update: max_staleness has to be 0.")
    return Simulation(workload, arrangement, rates, seed, losses).run(iterations)
