"""What lost nodes cost a long run, and how often it should write checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

MOST_LOSSES = 300
"""Losses of nodes after which a simulated run ends: its mean is then known within a few percent."""
LEAST_SEGMENTS = 20
LONGEST_FACTOR = 20.0
"""Times its time without losses after which a run that hardly gets on is given up."""


@dataclass(frozen=True, slots=True)
class Faults:
    """How nodes are lost, and what follows.

    Attributes:
        node_mtbf_s: mean seconds between two losses of one node; losses are independent.
        learner_nodes: nodes whose loss ends the learners: the run continues from its newest checkpoint.
        engine_nodes: other nodes, whose work others do again.
        checkpoint_s: that training waits for a checkpoint.
        restart_s: of actors and models.
        replacement_s: until another node is there.
        elastic: the run goes on with what is left, more slowly, in place of waiting for the replacement.
        slower_by_engines, slower_by_learners: time of an iteration with one such node less over that with all.
    """

    node_mtbf_s: float
    learner_nodes: int
    engine_nodes: int
    checkpoint_s: float
    restart_s: float
    replacement_s: float
    elastic: bool = False
    slower_by_engines: float = 1.0
    slower_by_learners: float = 1.0

    @property
    def rollback_mtbf_s(self) -> float:
        """Mean seconds between two losses after which work is done again."""
        return self.node_mtbf_s / self.learner_nodes

    @property
    def losses_per_s(self) -> float:
        """Of nodes of either kind."""
        return (self.learner_nodes + self.engine_nodes) / self.node_mtbf_s


@dataclass(frozen=True, slots=True)
class LongRun:
    """A long run with losses.

    Attributes:
        seconds: of the run.
        iterations: that were kept.
        losses: of nodes.
        repeated_s: of work that was done again.
        waiting_s: for nodes, and for actors to start.
        given_up: hardly anything was kept; figures are those up to there.
    """

    seconds: float
    iterations: float
    losses: int
    repeated_s: float
    waiting_s: float
    given_up: bool = False

    @property
    def iteration_s(self) -> float:
        """Seconds of the run an iteration; infinite where none was kept."""
        return self.seconds / self.iterations if self.iterations and not self.given_up else math.inf


def young_daly_s(faults: Faults) -> float:
    """Seconds between checkpoints by Young's formula, sqrt(2 C M) (Young 1974; Daly 2006 refines it)."""
    return math.sqrt(2 * faults.checkpoint_s * faults.rollback_mtbf_s)


def simulate_losses(faults: Faults, iteration_s: float, checkpoint_every: int, seed: int = 0) -> LongRun:
    """Train with losses, segment after segment of ``checkpoint_every`` iterations and a checkpoint.

    Args:
        faults: rates and times.
        iteration_s: seconds of an iteration without losses.
        checkpoint_every: iterations between checkpoints.
        seed: fixes when nodes are lost.
    """
    segment = checkpoint_every * iteration_s + faults.checkpoint_s
    per_segment = faults.losses_per_s * segment
    number = LEAST_SEGMENTS + (math.ceil(MOST_LOSSES / per_segment) if per_segment else 0)
    run = _Clock(faults, Random(seed), LONGEST_FACTOR * number * segment)
    kept = 0
    while kept < number and not run.given_up:
        kept += run.train(segment, number - kept)
    return LongRun(run.now, kept * checkpoint_every, run.losses, run.repeated_s, run.waiting_s, run.given_up)


class _Clock:
    """Time of a run with losses; from one loss to the next it only goes on.

    Args:
        faults: rates and times.
        random: draws the losses.
        limit_s: when the run is given up.
    """

    def __init__(self, faults: Faults, random: Random, limit_s: float) -> None:
        self._faults, self._random, self._limit_s = faults, random, limit_s
        self._slow_until = {"engines": 0.0, "learners": 0.0}
        self._next_loss = self._draw()
        self.now = self.repeated_s = self.waiting_s = 0.0
        self.losses = 0

    @property
    def given_up(self) -> bool:
        return self.now >= self._limit_s

    def _draw(self) -> float:
        rate = self._faults.losses_per_s
        return self._random.expovariate(rate) if rate else math.inf

    def train(self, segment: float, most: int) -> int:
        """Until a segment is done and its checkpoint written, or several up to the next loss; returns how many."""
        undisturbed = math.floor(min(most, (self._next_loss - self.now) / segment))
        if undisturbed >= 1 and self._slowness()[0] == 1.0:
            self.now += undisturbed * segment
            return undisturbed
        left = segment
        while left > 0 and not self.given_up:
            slowness, until = self._slowness()
            end = self.now + left * slowness
            if end <= min(until, self._next_loss):
                self.now, left = end, 0.0
            else:
                at = min(until, self._next_loss)
                left, self.now = left - (at - self.now) / slowness, at
                if at == self._next_loss and self._lose():
                    self.repeated_s += segment - left
                    left = segment
        return int(left <= 0)

    def _slowness(self) -> tuple[float, float]:
        """Factor of the time of an iteration now, and until when it holds."""
        faults, slow = self._faults, {kind: until for kind, until in self._slow_until.items() if until > self.now}
        factors = {"engines": faults.slower_by_engines, "learners": faults.slower_by_learners}
        return max([1.0, *(factors[kind] for kind in slow)]), min([math.inf, *slow.values()])

    def _lose(self) -> bool:
        """A node is lost; returns whether the work since the checkpoint is, too."""
        faults = self._faults
        nodes = faults.learner_nodes + faults.engine_nodes
        of_learners = self._random.random() * nodes < faults.learner_nodes
        self.losses += 1
        self._next_loss = self.now + self._draw()
        if faults.elastic and (not of_learners or faults.learner_nodes > 1):
            self._slow_until["learners" if of_learners else "engines"] = self.now + faults.replacement_s
            # Learners start twice: with those that are left, and with the new node.
            self._wait(2 * faults.restart_s if of_learners else 0.0)
        else:
            self._wait(faults.replacement_s + faults.restart_s)
        return of_learners

    def _wait(self, seconds: float) -> None:
        """Wait; the loss of another node meanwhile restarts the wait."""
        end = self.now + seconds
        while self._next_loss < end < self._limit_s:
            self.losses += 1
            end = self._next_loss + seconds
            self._next_loss += self._draw()
        self.waiting_s += end - self.now
        self.now = end


def checkpoint_intervals(iteration_s: float, faults: Faults) -> Iterator[int]:
    """Iterations between checkpoints that are worth a try: from an eighth to eight times Young's, in steps of a factor of 1.4."""
    young = young_daly_s(faults) / iteration_s
    yield from sorted({max(1, round(young * 2 ** (power / 2))) for power in range(-6, 7)})


def best_interval(faults: Faults, iteration_s: float, seed: int = 0) -> tuple[int, LongRun]:
    """The checkpoint interval in iterations with which a run with losses is fastest, of :func:`checkpoint_intervals`."""
    runs = {
        every: simulate_losses(faults, iteration_s, every, seed) for every in checkpoint_intervals(iteration_s, faults)
    }
    best = min(runs, key=lambda every: (runs[every].iteration_s, every))
    return best, runs[best]
