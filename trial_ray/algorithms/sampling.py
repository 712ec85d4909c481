"""Sampling of groups of rollouts: which tasks an iteration starts, and which groups it trains on.

Let T be ``tasks_per_iteration`` and n ``max_staleness``. When an iteration starts, groups are started until T (n + 1) are in
flight. A group that was started with weight version b has no turn of an older version, so it can enter the updates of versions b
to b + n. An update takes T finished groups, the oldest first. It starts only when the unfinished groups leave room for the
remaining updates: at most T k of them must enter one of the next k updates. Therefore no group gets too old, in any order of
completion, and no group is dropped for being slow. With n = 0, an update waits for all started groups, and nothing is sampled
during it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from trial_ray.algorithms.sampled_batch import MIN_COMPLETED, SampledBatch
from trial_ray.algorithms.tasks import TaskSampler
from trial_ray.config.run import RunSettings
from trial_ray.engines.protocol import SamplingParams
from trial_ray.errors import InfrastructureError, PromptTooLongError
from trial_ray.rollout.env_runner_pool import EnvRunnerPool, PlayingGroup
from trial_ray.rollout.episode import derive_seed
from trial_ray.rollout.groups import GroupRequest, GroupSample, SampleSettings, failure_of

logger = logging.getLogger(__name__)

MAX_LOSSES = 5
"""Maximum number of times that a group is played again because it was lost with its env runner: an environment may crash or
block the env runner each time."""


@dataclass(eq=False)
class StartedGroup:
    """A group that was started and has not entered an update.

    Attributes:
        request: request that the task sampler has drawn.
        version: version of the weights at its start; none of its turns has an older version.
        playing: handle of the group at its env runner; ``None`` before the group was sent to an env runner.
        draws: number of times that the group was played again with another seed, because too few of its rollouts completed.
        losses: number of times that the group was played again with the same seed, because it was lost with its env runner.
        finished: whether the group can enter an update: enough of its rollouts completed, or it will not be played again.
        sample: the played rollouts; ``None`` if they were lost.
    """

    request: GroupRequest
    version: int
    playing: PlayingGroup | None = None
    draws: int = 0
    losses: int = 0
    finished: bool = False
    sample: GroupSample | None = None

    @property
    def num_rows(self) -> int:
        """Number of turn rows that wait for an update."""
        return self.sample.num_rows if self.sample is not None else 0


class GroupSampler:
    """Plays the tasks of the current iteration and, with ``max_staleness``, of the next iterations.

    Args:
        config: numbers of tasks and rollouts, sampling settings, and the maximum staleness.
        tasks: source of the tasks.
        pool: the env runners.
        version: function that returns the current version of the weights, which the engines have.
    """

    def __init__(
        self, config: RunSettings, tasks: TaskSampler, pool: EnvRunnerPool, version: Callable[[], int]
    ) -> None:
        self._config = config
        self._tasks = tasks
        self._pool = pool
        self._version = version
        self._settings = SampleSettings(
            env_configs=tuple(dict(entry.config) for entry in config.environment_entries()),
            params=SamplingParams(config.max_response_tokens, config.temperature, stop=tuple(config.stop_strings)),
            seeded=config.seeded_sampling,
        )
        self._received: list[GroupSample] = []
        """The samples that env runners returned since the last batch."""
        self._in_flight: list[StartedGroup] = []
        self._next_index = 0
        self._iteration = 0
        self._rows_in_flight = 0
        self._redrawn_rows = 0
        self._on_policy_next = False
        self._starts_differ = False

    def sample(self, iteration: int) -> SampledBatch:
        """Start new groups, wait until enough groups are finished, and return the groups that the next update trains on.

        With ``drop_zero_variance_groups``, further tasks are played in place of dropped groups, at most ``max_refills`` times.
        After an error, the next call plays the same tasks from the start.

        Args:
            iteration: counted from 1.

        Raises:
            InfrastructureError: no group has enough completed rollouts, or no env runner or engine is left.
            PromptTooLongError: the first prompts of all tasks exceed ``max_prompt_tokens``.
        """
        config, self._iteration = self._config, iteration
        batch = SampledBatch(rows_carried_in=self._rows_in_flight, on_policy=self._on_policy_next)
        with self._restarting_on_error(batch):
            if self._on_policy_next:
                self.cancel()
                self._draw_again(self._in_flight, batch)
                self._in_flight = []
            capacity = config.tasks_per_iteration * (1 if self._on_policy_next else 1 + config.max_staleness)
            self._on_policy_next = False
            self._start_new(max(0, capacity - len(self._in_flight)))
            self._add_to_batch(batch)
            if config.drop_zero_variance_groups:
                self._resample(batch)
            self._received.sort(key=lambda sample: sample.request.index)
            if config.trajectories_folder is not None and self._received:
                self._pool.record(iteration, self._received)
        batch.task_metrics = self._tasks.metrics()
        batch.redrawn_rows, self._redrawn_rows = self._redrawn_rows, 0
        batch.num_in_flight = len(self._in_flight)
        batch.rows_in_flight = self._rows_in_flight = sum(group.num_rows for group in self._in_flight)
        for sample in self._received:
            batch.counts[sample.request.environment] += sample.counts
        self._received = []
        return batch

    def finish(self) -> None:
        """Wait until every group in flight is finished; the groups enter the next updates. Raises the errors of :meth:`sample`."""
        if self._num_unfinished():
            with self._restarting_on_error(SampledBatch()):
                self._receive_until(lambda: not self._num_unfinished())

    def cancel(self) -> None:
        """Cancel the unfinished groups, without waiting."""
        self._pool.cancel(self._unfinished())

    def runners_with_groups(self) -> set[int]:
        """Return the indices of the env runners that are playing, or have played, a group in flight."""
        return {group.playing.runner for group in self._in_flight if group.playing is not None}

    def note_effective_sample_size(self, size: float) -> None:
        """Restrict the next iteration to the current weights if the last update's effective sample size was too small."""
        minimum = self._config.min_effective_sample_size
        self._on_policy_next = self._config.max_staleness > 0 and not size >= minimum
        if self._on_policy_next:
            logger.warning(
                "effective sample size %.3g is below min_effective_sample_size=%g: the %d groups in flight start again under the "
                "new weights, and the next iteration waits for all of its groups",
                size,
                minimum,
                len(self._in_flight),
            )

    def get_state(self) -> dict[str, Any]:
        """Return the state for a resumed run.

        The state has the position in the task list, the requests of the groups in flight, which are played again from the
        start, and whether the next iteration trains only on rollouts of the current weights.
        """
        state = self._tasks.get_state(in_flight=[group.request for group in self._oldest_first()])
        return {**state, "on_policy_next": self._on_policy_next, "rows_in_flight": self._rows_in_flight}

    def set_state(self, state: dict[str, Any]) -> None:
        """Drop the groups in flight and continue from a state of :meth:`get_state`.

        Raises:
            CheckpointError: the state has another number of environments.
        """
        self.cancel()
        self._in_flight, self._received = [], []
        # Rows that were in flight at the checkpoint are lost; count them as resampled.
        self._rows_in_flight = self._redrawn_rows = state["rows_in_flight"]
        self._on_policy_next = state["on_policy_next"]
        self._tasks.set_state(state)

    def restart(self) -> None:
        """Drop the groups in flight and draw them again, and count their turn rows as resampled."""
        received, logged = self._received, self._rows_in_flight
        rows = self._redrawn_rows + sum(group.num_rows for group in self._in_flight)
        self.set_state(self.get_state())
        self._received, self._rows_in_flight, self._redrawn_rows = received, logged, rows

    @contextmanager
    def _restarting_on_error(self, batch: SampledBatch) -> Iterator[None]:
        """If the ``with`` block raises, draw the groups in flight and in the batch again, and count their rows as resampled."""
        try:
            yield
        except Exception:
            self.restart()
            samples = [*batch.kept, *batch.dropped]
            self._tasks.put_back([sample.request for sample in samples])
            self._redrawn_rows += batch.stale_rows + sum(sample.num_rows for sample in samples)
            raise

    # -- groups in flight --------------------------------------------------------------------------------------------

    def _oldest_first(self) -> list[StartedGroup]:
        return sorted(self._in_flight, key=lambda group: (group.version, group.request.index))

    def _unfinished(self) -> list[PlayingGroup]:
        return [group.playing for group in self._in_flight if group.playing is not None and not group.finished]

    def _num_unfinished(self, since: int | None = None) -> int:
        """Return the number of unfinished groups; with ``since``, of those started with version ``since`` or an older version."""
        return sum(not group.finished and (since is None or group.version <= since) for group in self._in_flight)

    def _can_update(self) -> bool:
        """Return whether enough groups are finished, and all other groups can enter a later update before they are too old."""
        num_tasks, staleness = self._config.tasks_per_iteration, self._config.max_staleness
        if len(self._in_flight) - self._num_unfinished() < min(num_tasks, len(self._in_flight)):
            return False
        oldest = self._version() - staleness  # Groups of version `oldest` can enter only the next update.
        return all(self._num_unfinished(oldest + updates) <= num_tasks * updates for updates in range(staleness))

    def _start_new(self, num_tasks: int) -> None:
        """Draw tasks, and start their groups."""
        requests = self._tasks.draw(num_tasks, self._config.group_size)
        # Indices grow over the whole run, because env runners start groups with lower indices earlier.
        requests = [replace(request, index=self._next_index + request.index) for request in requests]
        self._next_index += len(requests)
        groups = [StartedGroup(request, self._version()) for request in requests]
        # Add the groups to those in flight first: all groups in flight are drawn again if no env runner is left.
        self._in_flight += groups
        self._start(groups)

    def _start(self, groups: Sequence[StartedGroup]) -> None:
        """Start playing the groups with the current weights."""
        for group in groups:
            group.playing, group.version = None, self._version()
        requests = [
            # A group is played again with another seed if too few of its rollouts had completed.
            replace(group.request, seed=derive_seed(group.request.seed, "redraw", group.draws))
            if group.draws
            else group.request
            for group in groups
        ]
        for group, playing in zip(groups, self._pool.submit(requests, self._settings, self._unfinished()), strict=True):
            group.playing = playing

    def _draw_again(self, groups: Sequence[StartedGroup], batch: SampledBatch) -> None:
        """Draw the tasks of the groups again, before other tasks; the caller drops the groups."""
        self._tasks.put_back([group.request for group in sorted(groups, key=lambda group: group.request.index)])
        batch.num_stale += len(groups)
        batch.stale_rows += sum(group.num_rows for group in groups)

    # -- groups that enter an update -----------------------------------------------------------------------------------

    def _add_to_batch(self, batch: SampledBatch, resampling: bool = False) -> None:
        """Wait until an update can start, and move the oldest finished groups into the batch."""
        self._receive_until(self._can_update)
        finished = [group for group in self._oldest_first() if group.finished][: self._config.tasks_per_iteration]
        samples = [group.sample for group in finished if group.sample is not None]
        if not resampling and not any(sample.num_completed >= MIN_COMPLETED for sample in samples):
            raise self._all_lost(samples)
        self._pool.pop_losses()
        oldest = self._version() - self._config.max_staleness
        stale = [
            group for group in finished if group.sample and group.num_rows and group.sample.weight_versions[0] < oldest
        ]
        self._draw_again(stale, batch)
        self._in_flight = [group for group in self._in_flight if group not in finished]
        for group in finished:
            if group.sample is not None and group not in stale:
                self._keep_or_drop(group.sample, batch)

    def _resample(self, batch: SampledBatch) -> None:
        """Play new tasks in place of dropped groups, up to ``max_refills`` times; no other groups are in flight meanwhile."""
        for _ in range(self._config.max_refills):
            if not (missing := self._config.tasks_per_iteration - len(batch.kept)):
                return
            batch.num_refilled += missing
            self._start_new(missing)
            self._add_to_batch(batch, resampling=True)

    def _keep_or_drop(self, sample: GroupSample, batch: SampledBatch) -> None:
        """Keep a group to train on it, or drop it."""
        if sample.too_long is not None:
            logger.warning("a task is dropped, because its first prompt does not fit: %s", sample.too_long)
        if sample.starts_differ and not self._starts_differ:
            # Warn about different first observations only once; the metric groups/unequal_start_fraction covers all groups.
            self._starts_differ = True
            logger.warning(
                "The rollouts of task %r begin with different observations, although they have one seed: their advantages also "
                "compare how hard these starts are. Let the environment's reset depend on its seed and options alone.",
                sample.request.task_id,
            )
        self._tasks.note(sample)
        dropped = self._config.drop_zero_variance_groups and sample.zero_variance
        (batch.dropped if dropped or sample.num_completed < MIN_COMPLETED else batch.kept).append(sample)

    def _all_lost(self, samples: Sequence[GroupSample]) -> InfrastructureError | PromptTooLongError:
        """Return the error for an iteration without a group to train on."""
        losses = self._pool.pop_losses()
        too_long = [sample.too_long for sample in samples if sample.too_long is not None]
        if too_long and len(too_long) == len(samples):
            tasks = ", ".join(sorted({repr(sample.request.task_id) for sample in samples}))
            return PromptTooLongError(
                f"The first prompts of all {len(samples)} tasks of iteration {self._iteration} do not fit ({tasks}): {too_long[0]}"
            )
        return failure_of(
            f"Iteration {self._iteration} has no group with {MIN_COMPLETED} completed rollouts", samples, losses
        )

    # -- groups that end ---------------------------------------------------------------------------------------------

    def _receive_until(self, enough: Callable[[], bool]) -> None:
        """Receive groups until ``enough()`` is true.

        A group with too few completed rollouts is played again up to ``max_group_redraws`` times, a group of a lost env runner
        up to :data:`MAX_LOSSES` times. If no group ends within ``sample_timeout_s``, the env runners of all unfinished groups
        count as lost.
        """
        wait_s = 0.0  # The first call of wait() does not block.
        while True:
            playing = self._unfinished()
            samples, lost_runners = self._pool.wait(playing, wait_s)
            if errors := [error for sample in samples.values() for error in sample.errors]:
                total = sum(len(sample.episodes) for sample in samples.values())
                logger.warning("%d of %d rollouts failed and are dropped; the first: %s", len(errors), total, errors[0])
            if wait_s and not samples and not lost_runners:
                lost_runners = self._pool.replace_late(playing)
            self._received += samples.values()
            failed = []
            for group in self._in_flight:
                if group.playing in samples:
                    group.sample = sample = samples[group.playing]
                    # A task whose first prompt exceeds max_prompt_tokens is not played again.
                    group.finished = sample.num_completed >= MIN_COMPLETED or sample.too_long is not None
                    if not group.finished:
                        failed.append(group)
            # Finished groups of a lost env runner count as lost, too: the node that stores them may have failed.
            lost = [
                group
                for group in self._in_flight
                if group.playing is not None and group.playing.runner in lost_runners and group not in failed
            ]
            if again := [*self._repeated(failed, lost=False), *self._repeated(lost, lost=True)]:
                self._pool.repair(len(again))
                self._start(again)
            if enough():
                return
            wait_s = self._config.sample_timeout_s

    def _repeated(self, groups: Sequence[StartedGroup], lost: bool) -> list[StartedGroup]:
        """Return those of ``groups`` that are played again; mark groups with the maximum number of repetitions as finished."""
        for group in groups:
            if lost:
                repeats = group.losses < MAX_LOSSES
                group.losses += repeats
                if not repeats:
                    task_id = group.request.task_id
                    logger.warning("task %r is dropped: its env runners were lost %d times", task_id, MAX_LOSSES + 1)
            else:
                repeats = group.draws < self._config.max_group_redraws
                group.draws += repeats
            group.finished = not repeats
            if lost or repeats:
                self._redrawn_rows += group.num_rows
                group.sample = None
        return [group for group in groups if not group.finished]
