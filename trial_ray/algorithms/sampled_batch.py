"""The groups of rollouts of one iteration, and their metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ray.rllib.utils.metrics import (
    NUM_ENV_STEPS_SAMPLED,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
    NUM_EPISODES,
    NUM_EPISODES_LIFETIME,
)

from trial_ray.files import Numbers
from trial_ray.rollout.groups import GroupSample, RolloutCounts

MIN_COMPLETED = 2
"""Minimum number of completed rollouts of a group that is trained on: a group's advantages compare its rollouts."""


@dataclass
class SampledBatch:
    """The groups of one iteration. A turn row is the prompt and response of one turn, as a training sample.

    Rows sampled = rows of ``kept`` + rows of ``dropped`` + ``redrawn_rows`` + ``stale_rows`` + the increase of
    ``rows_in_flight`` since the previous iteration.

    Attributes:
        kept: groups to train on, in task order.
        dropped: groups that are not trained on, because too few of their rollouts completed or all their advantages are 0.
        redrawn_rows: turn rows of groups that were played again because too few of their rollouts completed, because the
            groups were lost with their env runner, or because all groups in flight were restarted.
        num_refilled: number of tasks that were drawn in place of dropped groups.
        num_stale: number of groups that were started again because some of their turns were sampled with older weights than
            allowed.
        stale_rows: turn rows of the groups that ``num_stale`` counts.
        num_in_flight: number of groups that were started and wait for a later iteration, finished or not.
        rows_in_flight: turn rows of the finished groups that ``num_in_flight`` counts.
        rows_carried_in: ``rows_in_flight`` of the previous iteration.
        on_policy: whether the iteration was restricted to the current weights because of the previous iteration's effective
            sample size.
        counts: sums over all rollouts that env runners returned since the previous iteration, by the index of their environment.
        task_metrics: metrics of the task sampler, by their keys in RLlib's result.
    """

    kept: list[GroupSample] = field(default_factory=list)
    dropped: list[GroupSample] = field(default_factory=list)
    redrawn_rows: int = 0
    num_refilled: int = 0
    num_stale: int = 0
    stale_rows: int = 0
    num_in_flight: int = 0
    rows_in_flight: int = 0
    rows_carried_in: int = 0
    on_policy: bool = False
    counts: dict[int, RolloutCounts] = field(default_factory=lambda: defaultdict(RolloutCounts))
    task_metrics: Numbers = field(default_factory=dict)

    @property
    def reason(self) -> str:
        """Human-readable reason why groups were dropped."""
        few = sum(sample.num_completed < MIN_COMPLETED for sample in self.dropped)
        same = len(self.dropped) - few
        return (
            f"in {same} groups every rollout earned the same reward, and in {few} groups fewer than {MIN_COMPLETED} rollouts were "
            "completed"
        )

    def metrics(self) -> Numbers:
        """Return metrics of groups and of turn rows, by their keys in RLlib's result."""
        ended = {
            "given_to_learners": sum(sample.num_rows for sample in self.kept),
            "left_out": sum(sample.num_rows for sample in self.dropped),
            "redrawn": self.redrawn_rows,
            "stale": self.stale_rows,
            "in_flight": self.rows_in_flight,
        }
        counts: Numbers = {
            "groups/num_trained": len(self.kept),
            "groups/num_dropped": len(self.dropped),
            "groups/num_too_long": sum(sample.too_long is not None for sample in self.dropped),
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
        # Exclude groups with fewer than MIN_COMPLETED completed rollouts from the fractions: their rewards cannot differ.
        samples = [sample for sample in (*self.kept, *self.dropped) if sample.num_completed >= MIN_COMPLETED]
        if not samples:
            return counts
        return counts | {
            "groups/zero_variance_fraction": sum(sample.zero_variance for sample in samples) / len(samples),
            "groups/unequal_start_fraction": sum(sample.starts_differ for sample in samples) / len(samples),
        }

    def rollout_metrics(self, environments: Sequence[str]) -> dict[str, Any]:
        """Return the metrics of all rollouts; with several environments, also by environment.

        Args:
            environments: names of the run's environments.
        """
        metrics = sum(self.counts.values(), RolloutCounts()).metrics()
        if len(environments) > 1:
            for index, counts in self.counts.items():
                metrics |= {f"{environments[index]}/{key}": value for key, value in counts.episode_metrics().items()}
        metrics[NUM_ENV_STEPS_SAMPLED_LIFETIME] = metrics[NUM_ENV_STEPS_SAMPLED]
        metrics[NUM_EPISODES_LIFETIME] = metrics[NUM_EPISODES]
        return metrics
