"""Samples the groups of rollouts of an iteration: redraws what was lost, refills what is not worth training on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from trial_ray.algorithms.task_sampler import TaskSampler
from trial_ray.errors import EnvironmentFaultError, InfrastructureError
from trial_ray.inference.protocol import SamplingParams
from trial_ray.rollout.episode import derive_seed
from trial_ray.rollout.requests import GroupRequest, GroupSample, SampleSettings
from trial_ray.rollout.workers import Batch, RolloutWorkers

if TYPE_CHECKING:
    from trial_ray.learner.settings import LearnerSettings

MIN_SURVIVORS = 2


@dataclass(slots=True)
class SampledBatch:
    """The groups of one iteration.

    Rows sampled = rows of ``kept`` + rows of ``left_out`` + ``redrawn_rows`` + ``stale_rows`` + what the rows in flight,
    finished but not trained on yet, have grown by.

    Attributes:
        kept: groups to train on, in task order.
        left_out: groups of which too few rollouts survived, or that were left out for having no variance.
        redrawn_rows: turn rows of groups that were drawn again because too few of their rollouts survived.
        num_refilled: tasks that were drawn in place of groups without variance.
        num_stale: groups that were begun again because older weights than allowed had sampled turns of them.
        stale_rows: turn rows of these groups.
        num_in_flight: groups that were begun and wait for a later iteration, finished or not.
        rows_in_flight: turn rows of those that are finished.
        rows_carried_in: ``rows_in_flight`` of the iteration before.
        on_policy: whether the iteration was held to the current weights for its predecessor's effective sample size.
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

    @property
    def reason(self) -> str:
        """Why groups were left out, for a person to read."""
        few = sum(sample.num_survivors < MIN_SURVIVORS for sample in self.left_out)
        same = len(self.left_out) - few
        return f"in {same} groups every rollout earned the same reward, of {few} fewer than {MIN_SURVIVORS} rollouts survived"

    def metrics(self) -> dict[str, dict[str, float]]:
        """Counts of groups and of turn rows."""
        ended = {
            "given_to_learners": sum(sample.num_rows for sample in self.kept),
            "left_out": sum(sample.num_rows for sample in self.left_out),
            "redrawn": self.redrawn_rows,
            "stale": self.stale_rows,
            "in_flight": self.rows_in_flight,
        }
        return {
            "groups": {
                "num_trained": len(self.kept),
                "num_dropped": len(self.left_out),
                "num_refilled": self.num_refilled,
                "num_stale": self.num_stale,
                "num_in_flight": self.num_in_flight,
                "num_of_several_versions": sum(len({*sample.weight_versions}) > 1 for sample in self.kept),
                "num_on_policy_iterations": int(self.on_policy),
                "num_empty_iterations": int(not self.kept),
            },
            "rows": {"sampled": sum(ended.values()) - self.rows_carried_in, **ended},
        }


class BatchSampler:
    """Plays the tasks of an iteration.

    Args:
        config: how many tasks and rollouts, and how they are sampled.
        tasks: where tasks come from.
        workers: the env runners.
        on_metrics: takes the runners' metrics of each call.
    """

    def __init__(
        self,
        config: LearnerSettings,
        tasks: TaskSampler,
        workers: RolloutWorkers,
        on_metrics: Callable[[list[dict[str, Any]]], None],
    ) -> None:
        self._config = config
        self._tasks = tasks
        self._workers = workers
        self._on_metrics = on_metrics

    def sample(self, iteration: int) -> SampledBatch:
        """Play ``tasks_per_iteration`` tasks, and further ones in place of groups without variance where that is asked for.

        Args:
            iteration: counted from 1.

        Raises:
            InfrastructureError: no group survived.
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
        return batch

    def _sort(self, sample: GroupSample, batch: SampledBatch) -> None:
        """Keep a group to train on it, or leave it out."""
        dropped = self._config.drop_zero_variance_groups and sample.zero_variance
        (batch.left_out if dropped or sample.num_survivors < MIN_SURVIVORS else batch.kept).append(sample)

    def finish(self) -> None:
        """Wait until env runners play nothing for training, so that they are free; here they play in :meth:`sample` only."""

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

    def _redrawn(self, request: GroupRequest, attempt: int) -> GroupRequest:
        """The request as it is made the first time, or again with another seed."""
        return replace(request, seed=derive_seed(request.seed, "redraw", attempt)) if attempt else request

    def _lost_all(self, iteration: int, samples: Sequence[GroupSample]) -> InfrastructureError:
        """The error of an iteration of whose groups none survived."""
        errors, losses = [error for sample in samples for error in sample.errors], self._workers.take_losses()
        causes = errors + losses
        # Environments that fail wherever they are played would fail again after a restart of the run.
        of_environments = errors and not losses and all(map(_is_of_environment, errors))
        return (EnvironmentFaultError if of_environments else InfrastructureError)(
            f"No group of rollouts survived iteration {iteration}"
            + (f"; the first error was: {causes[0]}" if causes else ": no env runner was left to play them.")
        )

    def _play_tasks(self, num_tasks: int, iteration: int, batch: SampledBatch) -> list[GroupSample]:
        """Play new tasks; a group of which too few rollouts survived is drawn again."""
        config, settings = self._config, self._settings(iteration)
        requests = self._tasks.draw(num_tasks, config.group_size)
        samples: dict[int, GroupSample] = {}
        for attempt in range(1 + config.max_group_redraws):
            missing = [
                self._redrawn(request, attempt)
                for request in requests
                if request.index not in samples or samples[request.index].num_survivors < MIN_SURVIVORS
            ]
            if not missing:
                break
            if attempt:
                self._workers.repair()
            for sample in self._play(missing, settings):
                if (before := samples.get(sample.request.index)) is not None:
                    batch.redrawn_rows += before.num_rows
                samples[sample.request.index] = sample
        return [samples[index] for index in sorted(samples)]

    def _play(self, requests: Sequence[GroupRequest], settings: SampleSettings) -> list[GroupSample]:
        batches: list[Batch] = self._workers.sample_groups(requests, settings)
        if batches:
            self._on_metrics([metrics for _, metrics in batches])
        return [sample for samples, _ in batches for sample in samples]


def _is_of_environment(error: str) -> bool:
    """Whether a rollout failed by its environment; errors of rollouts begin with their class."""
    return error.startswith(EnvironmentFaultError.__name__)
