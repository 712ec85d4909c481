"""Samples while the learner updates: whole groups enter an update when they are finished, the others a later one.

Let T be ``tasks_per_iteration`` and n ``max_staleness``. When an iteration begins under version v of the weights, groups are
started until T (n + 1) are in flight. A group that was started under version b has no turn of an older version, so it may enter
the updates of the versions b to b + n. An update takes T finished groups, the oldest first, and begins only once the
unfinished ones leave room for the updates that remain: of those that must enter one of the next k updates, at most T k.
So no group gets too old, whatever the order in which groups end, and none is left out for being slow.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from trial_ray.algorithms.sampling import MIN_SURVIVORS, BatchSampler, Repeats, SampledBatch, TaskSampler, is_final
from trial_ray.rollout.groups import GroupRequest, GroupSample
from trial_ray.rollout.workers import RolloutWorkers

if TYPE_CHECKING:
    from trial_ray.config.run import RunSettings

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class StartedGroup:
    """A group that was started and has not entered an update.

    Attributes:
        request: as drawn.
        version: weights under which it was started; none of its turns is of an older version.
        runner: env runner that plays it.
        repeats: how often it was played again.
        finished: whether it can enter an update; where it is not played again, also without survivors.
        sample: what was played; ``None`` where it was lost.
    """

    request: GroupRequest
    version: int = 0
    runner: int = 0
    repeats: Repeats = field(default_factory=Repeats)
    finished: bool = False
    sample: GroupSample | None = None

    @property
    def num_rows(self) -> int:
        """Turn rows that wait for an update."""
        return self.sample.num_rows if self.sample is not None else 0


class GroupsInFlight:
    """Groups that were started and have not entered an update; counted as they change, so that no look walks all of them."""

    def __init__(self) -> None:
        self._groups: dict[int, StartedGroup] = {}
        self._unfinished: Counter[int] = Counter()
        self._held: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._groups)

    def get(self, index: int) -> StartedGroup | None:
        """The group of this index, if it is in flight."""
        return self._groups.get(index)

    def groups(self) -> list[StartedGroup]:
        """In the order in which they were drawn."""
        return list(self._groups.values())

    def runners(self) -> set[int]:
        """Env runners that hold some of them, finished or not."""
        return set(self._held)

    def of_runners(self, runners: Collection[int]) -> list[StartedGroup]:
        """Those that these env runners hold."""
        return [group for group in self._groups.values() if group.runner in runners] if runners else []

    def num_unfinished(self, since: int | None = None) -> int:
        """Number of unfinished groups; of those that were started under weights up to version ``since``, where it is given."""
        return sum(count for version, count in self._unfinished.items() if since is None or version <= since)

    def place(self, group: StartedGroup, runner: int, version: int) -> None:
        """Note that an env runner plays the group from now on, under weights of this version."""
        if self._groups.get(group.request.index) is group:
            self._uncount(group)
        group.runner, group.version, group.finished = runner, version, False
        self._groups[group.request.index] = group
        self._held[runner] += 1
        self._unfinished[version] += 1

    def finish(self, group: StartedGroup) -> None:
        """Note that the group can enter an update."""
        if not group.finished:
            group.finished = True
            _take_one(self._unfinished, group.version)

    def remove(self, group: StartedGroup) -> bool:
        """Forget the group; returns whether it was in flight."""
        if self._groups.get(group.request.index) is not group:
            return False
        del self._groups[group.request.index]
        self._uncount(group)
        return True

    def _uncount(self, group: StartedGroup) -> None:
        _take_one(self._held, group.runner)
        if not group.finished:
            _take_one(self._unfinished, group.version)


def _take_one(counter: Counter[int], key: int) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]


class OverlappingSampler(BatchSampler):
    """Plays the tasks of this iteration and the next ones.

    Args:
        config: how many tasks and rollouts, how they are sampled, and how old they may become.
        tasks: where tasks come from.
        workers: the env runners.
        version: tells the version of the weights that engines hold and the next update changes.
    """

    def __init__(
        self,
        config: RunSettings,
        tasks: TaskSampler,
        workers: RolloutWorkers,
        version: Callable[[], int],
    ) -> None:
        super().__init__(config, tasks, workers)
        self._version = version
        self._in_flight = GroupsInFlight()
        self._next_index = 0
        self._iteration = 0
        self._rows_in_flight = 0
        self._redrawn_rows = 0
        self._on_policy_next = False

    def sample(self, iteration: int) -> SampledBatch:
        """Begin new groups, wait until enough of all are finished, and take those out that the next update trains on.

        Args:
            iteration: counted from 1.

        Raises:
            InfrastructureError: none of the groups survived, or no env runner is left.
            PromptTooLongError: no first prompt fits.
        """
        config, self._iteration = self._config, iteration
        batch = SampledBatch(rows_carried_in=self._rows_in_flight, on_policy=self._on_policy_next)
        if self._on_policy_next:
            self._workers.abandon_groups()
            self._begin_again(self._in_flight.groups(), batch)
        capacity = config.tasks_per_iteration * (1 if self._on_policy_next else 1 + config.max_staleness)
        self._on_policy_next = False
        self._begin_new(max(0, capacity - len(self._in_flight)))
        self._take_in_until(self._can_update)
        self._take(batch)
        batch.redrawn_rows, self._redrawn_rows = self._redrawn_rows, 0
        batch.num_in_flight = len(self._in_flight)
        batch.rows_in_flight = self._rows_in_flight = sum(group.num_rows for group in self._in_flight.groups())
        batch.counts = self._take_counts()
        self._iteration += 1  # what ends from now on is counted and recorded with the next iteration
        return batch

    def finish(self) -> None:
        """Wait until every group in flight is finished; they enter the next updates."""
        if self._in_flight.num_unfinished():
            self._take_in_until(lambda: not self._in_flight.num_unfinished())

    def runners_holding_groups(self) -> set[int]:
        """Env runners with groups that a later update trains on, finished or not."""
        return self._in_flight.runners()

    def note_effective_sample_size(self, size: float) -> None:
        """Sample the next iteration by the current weights alone where the last update's rows were too far from them."""
        least = self._config.min_effective_sample_size
        self._on_policy_next = not size >= least
        if self._on_policy_next:
            logger.warning(
                "effective sample size %.3g is below min_effective_sample_size=%g: the %d groups in flight begin again under "
                "the new weights, and the next iteration waits for all of its groups",
                size,
                least,
                len(self._in_flight),
            )

    def get_state(self) -> dict[str, Any]:
        """The position in the task list, the requests of the groups in flight, which are played again from the start, and whether
        the next iteration is held to the current weights."""
        state = self._tasks.get_state(in_flight=[group.request for group in self._oldest_first()])
        return {**state, "on_policy_next": self._on_policy_next}

    def set_state(self, state: dict[str, Any]) -> None:
        """Forget what is in flight and continue where :meth:`get_state` was taken."""
        self._workers.abandon_groups()
        self._in_flight = GroupsInFlight()
        self._rows_in_flight = self._redrawn_rows = 0
        self._on_policy_next = state.get("on_policy_next", False)  # checkpoints of earlier releases do not say
        self._counts.clear()
        super().set_state(state)

    # -- groups in flight --------------------------------------------------------------------------------------------

    def _oldest_first(self) -> list[StartedGroup]:
        return sorted(self._in_flight.groups(), key=lambda group: (group.version, group.request.index))

    def _can_update(self) -> bool:
        """Whether enough groups are finished, and the others can still enter an update before they are too old."""
        num_tasks, version = self._config.tasks_per_iteration, self._version()
        if len(self._in_flight) - self._in_flight.num_unfinished() < min(num_tasks, len(self._in_flight)):
            return False
        oldest = (
            version - self._config.max_staleness
        )  # what was started under these weights can enter this update alone
        return all(
            self._in_flight.num_unfinished(oldest + updates) <= num_tasks * updates
            for updates in range(self._config.max_staleness)
        )

    def _take(self, batch: SampledBatch) -> None:
        """Move the oldest finished groups into the batch."""
        finished = [group for group in self._oldest_first() if group.finished][: self._config.tasks_per_iteration]
        samples = [group.sample for group in finished if group.sample is not None]
        if not any(sample.num_survivors >= MIN_SURVIVORS for sample in samples):
            raise self._lost_all(self._iteration, samples)
        self._workers.take_losses()
        oldest = self._version() - self._config.max_staleness
        stale = [each for each in finished if each.sample and each.num_rows and each.sample.weight_versions[0] < oldest]
        self._begin_again(stale, batch)
        for group in finished:
            if self._in_flight.remove(group) and group.sample is not None:
                self._sort(group.sample, batch)

    def _begin_again(self, groups: Sequence[StartedGroup], batch: SampledBatch) -> None:
        """Drop what was played of these groups, and draw them before other tasks."""
        self._tasks.put_back([group.request for group in sorted(groups, key=lambda group: group.request.index)])
        for group in groups:
            batch.num_stale += 1
            batch.stale_rows += group.num_rows
            self._in_flight.remove(group)

    def _begin_new(self, num_tasks: int) -> None:
        requests = self._tasks.draw(num_tasks, self._config.group_size)
        # Indices are never used twice, so that what was given up is not taken for another group when it still arrives.
        requests = [replace(request, index=self._next_index + request.index) for request in requests]
        self._next_index += len(requests)
        groups = [StartedGroup(request) for request in requests]
        for group in groups:  # in flight also where no env runner is left to begin them, for the state that is saved
            self._in_flight.place(group, group.runner, self._version())
        self._begin(groups)

    def _begin(self, groups: Iterable[StartedGroup]) -> None:
        """Have the groups played under the current weights."""
        by_index = {group.request.index: group for group in groups}
        requests = [self._redrawn(group.request, group.repeats) for group in by_index.values()]
        for index, runner in self._workers.begin_groups(requests, self._settings(self._iteration)).items():
            self._in_flight.place(by_index[index], runner, self._version())

    # -- groups that end ---------------------------------------------------------------------------------------------

    def _take_in_until(self, enough: Callable[[], bool]) -> None:
        """Take in what ends until ``enough()``; groups that fail, or that a runner loses or ends too late, are played again."""
        timeout_s = self._config.sample_timeout_s
        deadline = time.monotonic() + timeout_s
        wait_s = 0.0  # at first only what has ended already
        while True:
            samples, dead = self._workers.take_groups(self._in_flight.runners(), self._iteration, wait_s)
            self._count(samples)
            lost = self._in_flight.of_runners(dead)
            failed = [group for each in samples if (group := self._take_in(each)) is not None]
            if samples:
                deadline = time.monotonic() + timeout_s
            elif time.monotonic() > deadline:
                late = self._workers.abandon_late()
                lost += [group for index in late if (group := self._in_flight.get(index)) is not None]
                deadline = time.monotonic() + timeout_s
            self._play_again(failed, lost=False)
            self._play_again(lost, lost=True)
            if enough():
                return
            wait_s = max(0.0, deadline - time.monotonic())

    def _take_in(self, sample: GroupSample) -> StartedGroup | None:
        """Note what was played of a group; returns it where too few rollouts survived."""
        group = self._in_flight.get(sample.request.index)
        if group is None or group.finished or sample.request != self._redrawn(group.request, group.repeats):
            self._redrawn_rows += sample.num_rows  # of a group that was given up
            return None
        group.sample = sample
        if not is_final(sample):
            return group
        self._in_flight.finish(group)
        return None

    def _play_again(self, groups: Sequence[StartedGroup], lost: bool) -> None:
        """Begin groups again that failed or were lost; those that were played too often are finished as they are."""
        again = []
        for group in groups:
            repeated = self._repeat(group.request, group.repeats, lost)
            if repeated or lost:
                self._redrawn_rows += group.num_rows
                group.sample = None
            if repeated:
                again.append(group)
            else:
                self._in_flight.finish(group)
        if again:
            self._workers.repair(len(again))
            self._begin(again)
