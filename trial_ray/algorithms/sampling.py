"""Tasks of an iteration, and the groups of rollouts that it trains on.

Let T be ``tasks_per_iteration`` and n ``max_staleness``. When an iteration starts with weight version v, groups are started until
T (n + 1) are in flight. A group that was started with version b has no turn of an older version, so it can enter the updates of
versions b to b + n. An update takes T finished groups, the oldest first. It starts only when the unfinished groups leave room for
the remaining updates: at most T k of them must enter one of the next k updates. Therefore no group gets too old, in any order of
completion, and no group is dropped for being slow. With n = 0, an update waits for all started groups, and nothing is sampled
during it.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from trial_ray.algorithms.tasks import TaskSampler
from trial_ray.engines.protocol import SamplingParams
from trial_ray.errors import InfrastructureError, PromptTooLongError
from trial_ray.rollout.env_runner_pool import EnvRunnerPool
from trial_ray.rollout.episode import derive_seed
from trial_ray.rollout.groups import GroupRequest, GroupSample, RolloutCounts, SampleSettings, failure_of

if TYPE_CHECKING:
    from trial_ray.config.run import RunSettings


logger = logging.getLogger(__name__)

MIN_SURVIVORS = 2
MAX_LOSSES = 5
"""Maximum number of times that a group lost with its env runner is played again: an environment may end or block its process
each time."""


@dataclass(slots=True)
class Repeats:
    """Number of times that a group was played again.

    Attributes:
        draws: with another seed, because too few of its rollouts completed.
        losses: with the same seed, because it was lost with its env runner; nothing is known about its episodes.
    """

    draws: int = 0
    losses: int = 0


@dataclass(slots=True)
class SampledBatch:
    """The groups of one iteration.

    Rows sampled = rows of ``kept`` + rows of ``left_out`` + ``redrawn_rows`` + ``stale_rows`` + the increase of
    ``rows_in_flight`` since the previous iteration.

    Attributes:
        kept: groups to train on, in task order.
        left_out: groups that were dropped because too few of their rollouts completed, or because their advantages are all 0.
        redrawn_rows: turn rows of groups that were played again because too few of their rollouts completed, or because they were
            lost.
        num_refilled: number of tasks that were drawn in place of dropped groups.
        num_stale: number of groups that were started again because some of their turns were sampled with older weights than
            allowed.
        stale_rows: turn rows of these groups.
        num_in_flight: number of groups that were started and wait for a later iteration, finished or not.
        rows_in_flight: turn rows of the finished groups among them.
        rows_carried_in: ``rows_in_flight`` of the previous iteration.
        on_policy: whether the iteration was restricted to the current weights because of the previous iteration's effective
            sample size.
        counts: counts of all rollouts that env runners returned since the previous iteration, by the index of their environment.
        task_metrics: metrics of the task sampler, by their keys in a result.
    """

    kept: list[GroupSample] = field(default_factory=list)
    left_out: list[GroupSample] = field(default_factory=list)
    redrawn_rows: int = 0
    num_refilled: int = 0
    num_stale: int = 0
    stale_rows: int = 0
    num_in_flight: int = 0
    rows_in_flight: int = 0
    rows_carried_in: int = 0
    on_policy: bool = False
    counts: dict[int, RolloutCounts] = field(default_factory=dict)
    task_metrics: dict[str, float] = field(default_factory=dict)

    @property
    def reason(self) -> str:
        """Human-readable reason why groups were dropped."""
        few = sum(sample.num_survivors < MIN_SURVIVORS for sample in self.left_out)
        same = len(self.left_out) - few
        return f"in {same} groups every rollout earned the same reward, of {few} fewer than {MIN_SURVIVORS} rollouts survived"

    def metrics(self) -> dict[str, float]:
        """Return counts of groups and of turn rows, by their keys in a result."""
        ended = {
            "given_to_learners": sum(sample.num_rows for sample in self.kept),
            "left_out": sum(sample.num_rows for sample in self.left_out),
            "redrawn": self.redrawn_rows,
            "stale": self.stale_rows,
            "in_flight": self.rows_in_flight,
        }
        counts: dict[str, float] = {
            "groups/num_trained": len(self.kept),
            "groups/num_dropped": len(self.left_out),
            "groups/num_too_long": sum(sample.too_long is not None for sample in self.left_out),
            "groups/num_refilled": self.num_refilled,
            "groups/num_stale": self.num_stale,
            "groups/num_in_flight": self.num_in_flight,
            "groups/num_of_several_versions": sum(len({*sample.weight_versions}) > 1 for sample in self.kept),
            "groups/num_on_policy_iterations": int(self.on_policy),
            "groups/num_empty_iterations": int(not self.kept),
            "rows/sampled": sum(ended.values()) - self.rows_carried_in,
            **{f"rows/{name}": count for name, count in ended.items()},
            **self.task_metrics,
        }
        # Rewards of fewer rollouts cannot differ, whatever the task.
        samples = [sample for sample in (*self.kept, *self.left_out) if sample.num_survivors >= MIN_SURVIVORS]
        if not samples:
            return counts
        return counts | {
            "groups/zero_variance_fraction": sum(sample.zero_variance for sample in samples) / len(samples),
            "groups/unequal_start_fraction": sum(sample.starts_differ for sample in samples) / len(samples),
        }


@dataclass(slots=True)
class StartedGroup:
    """A group that was started and has not entered an update.

    Attributes:
        request: request as drawn.
        version: version of the weights at its start; none of its turns has an older version.
        runner: env runner that plays or stores it.
        repeats: number of times that it was played again.
        finished: whether it can enter an update; a group that is not played again can, even without completed rollouts.
        sample: the played rollouts; ``None`` if they were lost.
    """

    request: GroupRequest
    version: int
    runner: int = 0
    repeats: Repeats = field(default_factory=Repeats)
    finished: bool = False
    sample: GroupSample | None = None

    @property
    def num_rows(self) -> int:
        """Number of turn rows that wait for an update."""
        return self.sample.num_rows if self.sample is not None else 0

    def request_again(self) -> GroupRequest:
        """Return the request for playing the group again, with another seed if too few of its rollouts had completed."""
        draws, request = self.repeats.draws, self.request
        return replace(request, seed=derive_seed(request.seed, "redraw", draws)) if draws else request


class GroupSampler:
    """Plays the tasks of this iteration and, with ``max_staleness``, of the next iterations.

    Args:
        config: numbers of tasks and rollouts, sampling settings, and the maximum staleness.
        tasks: source of the tasks.
        workers: the env runners.
        version: returns the version of the weights that engines have and that the next update changes.
    """

    def __init__(
        self, config: RunSettings, tasks: TaskSampler, workers: EnvRunnerPool, version: Callable[[], int]
    ) -> None:
        self._config = config
        self._tasks = tasks
        self._workers = workers
        self._version = version
        self._counts: defaultdict[int, RolloutCounts] = defaultdict(RolloutCounts)
        self._in_flight: dict[int, StartedGroup] = {}
        self._next_index = 0
        self._iteration = 0
        self._rows_in_flight = 0
        self._redrawn_rows = 0
        self._on_policy_next = False
        self._starts_differ = False

    def sample(self, iteration: int) -> SampledBatch:
        """Start new groups, wait until enough groups are finished, and return the groups that the next update trains on.

        With ``drop_zero_variance_groups``, further tasks are played in place of dropped groups, at most ``max_refills`` times.

        Args:
            iteration: counted from 1.

        After an error, the next call plays the same tasks from the start.

        Raises:
            InfrastructureError: no group has enough completed rollouts, or no env runner or engine is left.
            PromptTooLongError: no first prompt fits.
        """
        config, self._iteration = self._config, iteration
        batch = SampledBatch(rows_carried_in=self._rows_in_flight, on_policy=self._on_policy_next)
        with self._restarting_on_error(batch):
            if self._on_policy_next:
                self._workers.abandon_groups()
                self._begin_again(list(self._in_flight.values()), batch)
            capacity = config.tasks_per_iteration * (1 if self._on_policy_next else 1 + config.max_staleness)
            self._on_policy_next = False
            self._begin_new(max(0, capacity - len(self._in_flight)))
            self._take(batch)
            if config.drop_zero_variance_groups:
                self._refill(batch)
        batch.task_metrics = self._tasks.metrics()
        batch.redrawn_rows, self._redrawn_rows = self._redrawn_rows, 0
        batch.num_in_flight = len(self._in_flight)
        batch.rows_in_flight = self._rows_in_flight = sum(group.num_rows for group in self._in_flight.values())
        batch.counts, self._counts = dict(self._counts), defaultdict(RolloutCounts)
        self._iteration += 1  # what ends from now on is counted and recorded with the next iteration
        return batch

    def finish(self) -> None:
        """Wait until every group in flight is finished; the groups enter the next updates. Errors are as in :meth:`sample`."""
        if self._num_unfinished():
            with self._restarting_on_error(SampledBatch()):
                self._take_in_until(lambda: not self._num_unfinished())

    def runners_holding_groups(self) -> set[int]:
        """Return the env runners with groups that a later update trains on, finished or not."""
        return {group.runner for group in self._in_flight.values()}

    def note_effective_sample_size(self, size: float) -> None:
        """Restrict the next iteration to the current weights if the last update's rows had too small an effective sample size."""
        least = self._config.min_effective_sample_size
        self._on_policy_next = self._config.max_staleness > 0 and not size >= least
        if self._on_policy_next:
            logger.warning(
                "effective sample size %.3g is below min_effective_sample_size=%g: the %d groups in flight start again under the "
                "new weights, and the next iteration waits for all of its groups",
                size,
                least,
                len(self._in_flight),
            )

    def get_state(self) -> dict[str, Any]:
        """Return the position in the task list, the requests of the groups in flight, which are played again from the start,
        and whether the next iteration is restricted to the current weights."""
        state = self._tasks.get_state(in_flight=[group.request for group in self._oldest_first()])
        return {**state, "on_policy_next": self._on_policy_next, "rows_in_flight": self._rows_in_flight}

    def set_state(self, state: dict[str, Any]) -> None:
        """Drop the groups in flight and continue from a state of :meth:`get_state`; errors as in ``TaskSampler.set_state``."""
        self._workers.abandon_groups()
        self._in_flight = {}
        # These rows were logged as in flight, and are dropped.
        self._rows_in_flight = self._redrawn_rows = state["rows_in_flight"]
        self._on_policy_next = state["on_policy_next"]
        self._counts.clear()
        self._tasks.set_state(state)

    def restart(self) -> None:
        """Drop the groups in flight and draw them again, and count what they have sampled."""
        counts, logged = dict(self._counts), self._rows_in_flight
        rows = self._redrawn_rows + sum(group.num_rows for group in self._in_flight.values())
        self.set_state(self.get_state())
        self._counts.update(counts)
        self._rows_in_flight, self._redrawn_rows = logged, rows

    @contextmanager
    def _restarting_on_error(self, batch: SampledBatch) -> Iterator[None]:
        """After an error inside the context, draw the groups in flight and those of the batch again, and count their rows."""
        try:
            yield
        except Exception:
            self.restart()
            samples = [*batch.kept, *batch.left_out]
            self._tasks.put_back([sample.request for sample in samples])
            self._redrawn_rows += batch.stale_rows + sum(sample.num_rows for sample in samples)
            raise

    # -- groups in flight --------------------------------------------------------------------------------------------

    def _oldest_first(self) -> list[StartedGroup]:
        return sorted(self._in_flight.values(), key=lambda group: (group.version, group.request.index))

    def _num_unfinished(self, since: int | None = None) -> int:
        """Number of unfinished groups; with ``since``, only of groups that were started with weights up to this version."""
        return sum(
            not group.finished and (since is None or group.version <= since) for group in self._in_flight.values()
        )

    def _can_update(self) -> bool:
        """Return whether enough groups are finished, and the others can still enter an update before they are too old."""
        num_tasks, staleness = self._config.tasks_per_iteration, self._config.max_staleness
        if len(self._in_flight) - self._num_unfinished() < min(num_tasks, len(self._in_flight)):
            return False
        oldest = self._version() - staleness  # what was started under these weights can enter this update alone
        return all(self._num_unfinished(oldest + updates) <= num_tasks * updates for updates in range(staleness))

    def _begin_new(self, num_tasks: int) -> None:
        requests = self._tasks.draw(num_tasks, self._config.group_size)
        # Indices are never used twice, so that what was given up is not taken for another group when it still arrives.
        requests = [replace(request, index=self._next_index + request.index) for request in requests]
        self._next_index += len(requests)
        groups = [StartedGroup(request, self._version()) for request in requests]
        # Before the groups begin, so that they are drawn again if no env runner is left to begin them.
        self._in_flight |= {group.request.index: group for group in groups}
        self._begin(groups)

    def _begin(self, groups: Sequence[StartedGroup]) -> None:
        """Start playing the groups with the current weights."""
        runners = self._workers.begin_groups([group.request_again() for group in groups], self._settings())
        for group in groups:
            group.runner, group.version = runners[group.request.index], self._version()

    def _begin_again(self, groups: Sequence[StartedGroup], batch: SampledBatch) -> None:
        """Drop the rollouts of these groups, and draw the groups again before other tasks."""
        self._tasks.put_back([group.request for group in sorted(groups, key=lambda group: group.request.index)])
        for group in groups:
            batch.num_stale += 1
            batch.stale_rows += group.num_rows
            del self._in_flight[group.request.index]

    def _settings(self) -> SampleSettings:
        """Settings with which groups are played in training."""
        config = self._config
        return SampleSettings(
            env_configs=tuple(dict(entry.config) for entry in config.environment_entries()),
            params=SamplingParams(config.max_response_tokens, config.temperature, stop=tuple(config.stop_strings)),
            seeded=config.seeded_sampling,
        )

    # -- groups that enter an update -----------------------------------------------------------------------------------

    def _take(self, batch: SampledBatch, refill: bool = False) -> None:
        """Wait for the oldest groups, and move them into the batch."""
        self._take_in_until(self._can_update)
        finished = [group for group in self._oldest_first() if group.finished][: self._config.tasks_per_iteration]
        samples = [group.sample for group in finished if group.sample is not None]
        if not refill and not any(sample.num_survivors >= MIN_SURVIVORS for sample in samples):
            raise self._lost_all(samples)
        self._workers.take_losses()
        oldest = self._version() - self._config.max_staleness
        stale = [each for each in finished if each.sample and each.num_rows and each.sample.weight_versions[0] < oldest]
        self._begin_again(stale, batch)
        for group in finished:
            if self._in_flight.pop(group.request.index, None) is not None and group.sample is not None:
                self._sort(group.sample, batch)

    def _refill(self, batch: SampledBatch) -> None:
        """Play new tasks in place of dropped groups, up to ``max_refills`` times; no other groups are in flight then."""
        for _ in range(self._config.max_refills):
            if not (missing := self._config.tasks_per_iteration - len(batch.kept)):
                return
            batch.num_refilled += missing
            self._begin_new(missing)
            self._take(batch, refill=True)

    def _sort(self, sample: GroupSample, batch: SampledBatch) -> None:
        """Keep a group to train on it, or drop it."""
        if sample.too_long is not None:
            logger.warning("a task is dropped, because its first prompt does not fit: %s", sample.too_long)
        if sample.starts_differ and not self._starts_differ:
            self._starts_differ = True  # one warning a run; groups/unequal_start_fraction has the rest
            logger.warning(
                "The rollouts of task %r begin with different observations, although they have one seed: their advantages also "
                "compare how hard these starts are. Let the environment's reset depend on its seed and options alone.",
                sample.request.task_id,
            )
        self._tasks.note(sample)
        dropped = self._config.drop_zero_variance_groups and sample.zero_variance
        (batch.left_out if dropped or sample.num_survivors < MIN_SURVIVORS else batch.kept).append(sample)

    def _lost_all(self, samples: Sequence[GroupSample]) -> InfrastructureError | PromptTooLongError:
        """Return the error for an iteration without a group to train on."""
        losses = self._workers.take_losses()
        too_long = [sample.too_long for sample in samples if sample.too_long is not None]
        if too_long and len(too_long) == len(samples):
            tasks = ", ".join(sorted({repr(sample.request.task_id) for sample in samples}))
            return PromptTooLongError(
                f"The first prompts of all {len(samples)} tasks of iteration {self._iteration} do not fit ({tasks}): {too_long[0]}"
            )
        return failure_of(f"No group of rollouts survived iteration {self._iteration}", samples, losses)

    # -- groups that end ---------------------------------------------------------------------------------------------

    def _take_in_until(self, enough: Callable[[], bool]) -> None:
        """Collect ended groups until ``enough()``; groups that fail, that a runner loses or that end too late are played again."""
        wait_s = 0.0  # First pass: do not block.
        together = not self._config.max_staleness
        while True:
            # Without staleness, runners that have handed over theirs are left alone: a call would delay the next iteration's.
            runners = {group.runner for group in self._in_flight.values() if not (together and group.finished)}
            samples, dead = self._workers.take_groups(runners, self._iteration, wait_s, together)
            if wait_s and not samples and not dead:
                dead = self._workers.abandon_late()
            # A finished group is lost as well: its env runner may have gone with the node that stores the group.
            lost = [group for group in self._in_flight.values() if group.runner in dead]
            failed = [group for each in samples if (group := self._take_in(each)) is not None]
            self._play_again(failed, lost=False)
            self._play_again(lost, lost=True)
            if enough():
                return
            wait_s = self._config.sample_timeout_s

    def _take_in(self, sample: GroupSample) -> StartedGroup | None:
        """Record the rollouts of a group; returns the group if too few of them completed."""
        self._counts[sample.request.environment] += sample.counts
        group = self._in_flight.get(sample.request.index)
        if group is None or group.finished or sample.request != group.request_again():
            self._redrawn_rows += sample.num_rows  # of a group that was given up
            return None
        group.sample, group.finished = sample, is_final(sample)
        return None if group.finished else group

    def _play_again(self, groups: Iterable[StartedGroup], lost: bool) -> None:
        """Start groups again that failed or were lost; groups that were played too often are finished as they are."""
        again = []
        for group in groups:
            group.finished = not self._repeat(group, lost)
            if lost or not group.finished:
                self._redrawn_rows += group.num_rows
                group.sample = None
            if not group.finished:
                again.append(group)
        if again:
            self._workers.repair(len(again))
            self._begin(again)

    def _repeat(self, group: StartedGroup, lost: bool) -> bool:
        """Return whether a group that failed or was lost is played again, and count it."""
        repeats = group.repeats
        if not lost and repeats.draws < self._config.max_group_redraws:
            repeats.draws += 1
            return True
        if lost and repeats.losses < MAX_LOSSES:
            repeats.losses += 1
            return True
        if lost:
            logger.warning(
                "task %r is dropped: its env runners were lost %d times", group.request.task_id, MAX_LOSSES + 1
            )
        return False


def is_final(sample: GroupSample) -> bool:
    """Return whether a group need not be played again: enough rollouts completed, or the task's first prompt does not fit."""
    return sample.num_survivors >= MIN_SURVIVORS or sample.too_long is not None
