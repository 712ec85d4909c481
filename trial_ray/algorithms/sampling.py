"""Tasks of an iteration, and the groups of rollouts that it trains on."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from trial_ray.engines.protocol import SamplingParams
from trial_ray.errors import CheckpointError, ConfigError, InfrastructureError, PromptTooLongError
from trial_ray.rollout.episode import derive_seed
from trial_ray.rollout.groups import GroupRequest, GroupSample, RolloutCounts, SampleSettings, failure_of
from trial_ray.rollout.workers import RolloutWorkers

if TYPE_CHECKING:
    from trial_ray.config.run import RunSettings


class TaskSampler:
    """Shuffled passes over the task list of each environment; its state is a seed, a count an environment, and what was put back.

    With several environments, the one that lags most behind its share is next, so that any number of draws holds each in
    proportion to its weight, within about a task.

    Args:
        task_ids: the split's tasks of each environment, in its fixed order.
        seed: fixes the order of every pass and the seeds of every group.
        weights: share of each environment, in any unit, 0 where none is drawn; ``None``: equal shares.

    Raises:
        ConfigError: the list of an environment that is drawn from is empty.
    """

    def __init__(self, task_ids: Sequence[Sequence[str]], seed: int, weights: Sequence[float] | None = None) -> None:
        weights = weights or [1.0] * len(task_ids)
        if not task_ids or not all(listed for listed, weight in zip(task_ids, weights, strict=True) if weight):
            raise ConfigError("The training split has no tasks; choose another split in .environment(env_config=...).")
        self._task_ids = task_ids
        self._seed = seed
        self._shares = [weight / sum(weights) for weight in weights]
        self._drawn = [0] * len(task_ids)
        self._returned: list[GroupRequest] = []
        self._orders: dict[int, tuple[list[int], np.ndarray]] = {}
        """Of each environment the order of its last pass, and what that follows from."""

    def draw(self, num_tasks: int, group_size: int) -> list[GroupRequest]:
        """Requests for the next ``num_tasks`` groups, indexed from 0; those that were put back come first."""
        again, self._returned = self._returned[:num_tasks], self._returned[num_tasks:]
        requests = [replace(request, index=index, group_size=group_size) for index, request in enumerate(again)]
        for index in range(len(requests), num_tasks):
            total = sum(self._drawn)
            lags = [share * (total + 1) - drawn for share, drawn in zip(self._shares, self._drawn, strict=True)]
            environment = lags.index(max(lags))
            task_ids = self._task_ids[environment]
            passes, index_in_pass = divmod(self._drawn[environment], len(task_ids))
            task = task_ids[int(self._order(environment, passes)[index_in_pass])]
            seed = derive_seed(self._seed, "group", total)
            requests.append(GroupRequest(index, task, group_size, seed, environment))
            self._drawn[environment] += 1
        return requests

    def put_back(self, requests: Sequence[GroupRequest]) -> None:
        """Draw these requests again, with their tasks and seeds, before any other."""
        self._returned = [*requests, *self._returned]

    def get_state(self, in_flight: Sequence[GroupRequest] = ()) -> dict[str, Any]:
        """Tasks drawn so far of each environment, the seed they were drawn with, and the requests that are to be drawn again.

        Args:
            in_flight: requests that were drawn but not trained on; a resumed run draws them first.
        """
        returned = [
            {"task_id": request.task_id, "seed": request.seed, "environment": request.environment}
            for request in (*in_flight, *self._returned)
        ]
        return {"seed": self._seed, "drawn": list(self._drawn), "returned": returned}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`get_state` was taken.

        Raises:
            CheckpointError: the state is of another number of environments.
        """
        drawn = state["drawn"]
        if not isinstance(drawn, list) or len(drawn) != len(self._task_ids):
            raise CheckpointError(
                f"The checkpoint counts the tasks of other environments ({drawn!r}); the config has {len(self._task_ids)}."
            )
        self._seed, self._drawn = state["seed"], list(drawn)
        # Checkpoints of earlier releases have none.
        self._returned = [GroupRequest(index=0, group_size=0, **request) for request in state.get("returned", ())]

    def _order(self, environment: int, passes: int) -> np.ndarray:
        key = [self._seed, passes, environment] if environment else [self._seed, passes]
        if environment not in self._orders or self._orders[environment][0] != key:
            order = np.random.default_rng(key).permutation(len(self._task_ids[environment]))
            self._orders[environment] = key, order
        return self._orders[environment][1]


logger = logging.getLogger(__name__)

MIN_SURVIVORS = 2
MAX_LOSSES = 5
"""How often a group that was lost with its env runner is played again: an environment may end or block its process each time."""


@dataclass(slots=True)
class Repeats:
    """How often a group was played again.

    Attributes:
        draws: with another seed, because too few of its rollouts survived.
        losses: with the same seed, because it was lost with its env runner, which says nothing of its episodes.
    """

    draws: int = 0
    losses: int = 0


@dataclass(slots=True)
class SampledBatch:
    """The groups of one iteration.

    Rows sampled = rows of ``kept`` + rows of ``left_out`` + ``redrawn_rows`` + ``stale_rows`` + what the rows in flight,
    finished but not trained on yet, have grown by.

    Attributes:
        kept: groups to train on, in task order.
        left_out: groups of which too few rollouts survived, or that were left out for having no variance.
        redrawn_rows: turn rows of groups that were played again: too few of their rollouts survived, or they were lost.
        num_refilled: tasks that were drawn in place of groups without variance.
        num_stale: groups that were started again because older weights than allowed had sampled turns of them.
        stale_rows: turn rows of these groups.
        num_in_flight: groups that were started and wait for a later iteration, finished or not.
        rows_in_flight: turn rows of those that are finished.
        rows_carried_in: ``rows_in_flight`` of the iteration before.
        on_policy: whether the iteration was held to the current weights for its predecessor's effective sample size.
        counts: of all rollouts that env runners returned since the iteration before, by the index of their environment.
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

    @property
    def reason(self) -> str:
        """Why groups were left out, for a person to read."""
        few = sum(sample.num_survivors < MIN_SURVIVORS for sample in self.left_out)
        same = len(self.left_out) - few
        return f"in {same} groups every rollout earned the same reward, of {few} fewer than {MIN_SURVIVORS} rollouts survived"

    def metrics(self) -> dict[str, float]:
        """Counts of groups and of turn rows, by their keys in a result."""
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
        }
        # Rewards of fewer rollouts cannot differ, whatever the task.
        samples = [sample for sample in (*self.kept, *self.left_out) if sample.num_survivors >= MIN_SURVIVORS]
        if not samples:
            return counts
        return counts | {
            "groups/zero_variance_fraction": sum(sample.zero_variance for sample in samples) / len(samples)
        }


class BatchSampler:
    """Plays the tasks of an iteration.

    Args:
        config: how many tasks and rollouts, and how they are sampled.
        tasks: where tasks come from.
        workers: the env runners.
    """

    def __init__(
        self,
        config: RunSettings,
        tasks: TaskSampler,
        workers: RolloutWorkers,
    ) -> None:
        self._config = config
        self._tasks = tasks
        self._workers = workers
        self._counts: defaultdict[int, RolloutCounts] = defaultdict(RolloutCounts)

    def sample(self, iteration: int) -> SampledBatch:
        """Play ``tasks_per_iteration`` tasks, and further ones in place of groups without variance where that is asked for.

        Args:
            iteration: counted from 1.

        Raises:
            InfrastructureError: no group survived.
            PromptTooLongError: no first prompt fits.
        """
        config, batch = self._config, SampledBatch()
        for refill in range(1 + config.max_refills):
            missing = config.tasks_per_iteration - len(batch.kept)
            if not missing:
                break
            batch.num_refilled += missing if refill else 0
            samples = self._play_tasks(missing, iteration, batch)
            alive = [sample for sample in samples if sample.num_survivors >= MIN_SURVIVORS]
            if not alive and not refill:
                raise self._lost_all(iteration, samples)
            self._workers.take_losses()
            for sample in samples:
                self._sort(sample, batch)
            if not config.drop_zero_variance_groups:
                break
        batch.counts = self._take_counts()
        return batch

    def _sort(self, sample: GroupSample, batch: SampledBatch) -> None:
        """Keep a group to train on it, or leave it out."""
        if sample.too_long is not None:
            logger.warning("a task is left out, because its first prompt does not fit: %s", sample.too_long)
        dropped = self._config.drop_zero_variance_groups and sample.zero_variance
        (batch.left_out if dropped or sample.num_survivors < MIN_SURVIVORS else batch.kept).append(sample)

    def finish(self) -> None:
        """Wait until env runners play nothing for training, so that they are free; here they play in :meth:`sample` only."""

    def runners_holding_groups(self) -> set[int]:
        """Env runners with groups that a later update trains on; none here."""
        return set()

    def note_effective_sample_size(self, size: float) -> None:
        """Hear of the effective sample size of the last update, a share of its tokens."""

    def get_state(self) -> dict[str, Any]:
        """The position in the task list."""
        return self._tasks.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`get_state` was taken; errors as ``TaskSampler.set_state``."""
        self._tasks.set_state(state)

    def _settings(self, iteration: int) -> SampleSettings:
        """How groups are played in training."""
        config = self._config
        return SampleSettings(
            env_configs=tuple(dict(entry.config) for entry in config.environment_entries()),
            params=SamplingParams(config.max_response_tokens, config.temperature),
            iteration=iteration,
            keep_trajectories=True,
            seeded=config.seeded_sampling,
        )

    def _redrawn(self, request: GroupRequest, repeats: Repeats) -> GroupRequest:
        """The request as it is made the first time, or again with another seed."""
        return replace(request, seed=derive_seed(request.seed, "redraw", repeats.draws)) if repeats.draws else request

    def _repeat(self, request: GroupRequest, repeats: Repeats, lost: bool) -> bool:
        """Whether a group that failed or was lost is played again; counts it."""
        if not lost and repeats.draws < self._config.max_group_redraws:
            repeats.draws += 1
            return True
        if lost and repeats.losses < MAX_LOSSES:
            repeats.losses += 1
            return True
        if lost:
            logger.warning("task %r is left out: its env runners were lost %d times", request.task_id, MAX_LOSSES + 1)
        return False

    def _lost_all(self, iteration: int, samples: Sequence[GroupSample]) -> InfrastructureError | PromptTooLongError:
        """The error of an iteration of whose groups none survived."""
        losses = self._workers.take_losses()
        too_long = [sample.too_long for sample in samples if sample.too_long is not None]
        if too_long and len(too_long) == len(samples):
            tasks = ", ".join(sorted({repr(sample.request.task_id) for sample in samples}))
            return PromptTooLongError(
                f"The first prompts of all {len(samples)} tasks of iteration {iteration} do not fit ({tasks}): {too_long[0]}"
            )
        return failure_of(f"No group of rollouts survived iteration {iteration}", samples, losses)

    def _play_tasks(self, num_tasks: int, iteration: int, batch: SampledBatch) -> list[GroupSample]:
        """Play new tasks; a group of which too few rollouts survived is drawn again, one that was lost is played again."""
        settings = self._settings(iteration)
        pending = [(request, Repeats()) for request in self._tasks.draw(num_tasks, self._config.group_size)]
        samples: dict[int, GroupSample] = {}
        while pending:
            played = self._play([self._redrawn(request, repeats) for request, repeats in pending], settings)
            found = {sample.request.index: sample for sample in played}
            batch.redrawn_rows += sum(samples[index].num_rows for index in found if index in samples)
            samples |= found
            pending = [
                (request, repeats)
                for request, repeats in pending
                if not (request.index in found and is_final(found[request.index]))
                and self._repeat(request, repeats, lost=request.index not in found)
            ]
            if pending:
                self._workers.repair(len(pending))
        return [samples[index] for index in sorted(samples)]

    def _play(self, requests: Sequence[GroupRequest], settings: SampleSettings) -> list[GroupSample]:
        samples = self._workers.sample_groups(requests, settings)
        self._count(samples)
        return samples

    def _count(self, samples: Sequence[GroupSample]) -> None:
        for sample in samples:
            self._counts[sample.request.environment] += sample.counts

    def _take_counts(self) -> dict[int, RolloutCounts]:
        counts = dict(self._counts)
        self._counts.clear()
        return counts


def is_final(sample: GroupSample) -> bool:
    """Whether a group need not be played again: enough of its rollouts survived, or its task's first prompt does not fit."""
    return sample.num_survivors >= MIN_SURVIVORS or sample.too_long is not None
