"""Task sampling by difficulty: tasks are drawn by the policy's success rate on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trial_ray.algorithms.task_sampler import TaskSampler
from trial_ray.rollout.groups import GroupRequest, GroupSample

PRIOR = 1.0
"""Initial number of successes and of failures of every task, Beta(1, 1): p of a task that was never played is 1/2."""
DECAY = 0.5
"""Factor on the earlier counts of a task, with each further group of it."""
FLOOR = 0.1
"""Share of the probability that is uniform over all tasks."""


class SuccessRateSampler(TaskSampler):
    """Draws a task with a probability that follows p (1 − p) of its success rate p, the variance of its rollouts' success.

    p is the mean of a Beta distribution over the exponentially weighted counts of the task's rollouts. A call of ``draw`` draws
    no task twice while there are others. Arguments and errors are as in :class:`TaskSampler`.
    """

    def __init__(self, task_ids: Sequence[Sequence[str]], seed: int, weights: Sequence[float] | None = None) -> None:
        super().__init__(task_ids, seed, weights)
        self._places = [{task: place for place, task in enumerate(listed)} for listed in task_ids]
        self._counts = [np.zeros((len(listed), 2)) for listed in task_ids]  # successes, failures

    def _next_task(self, environment: int, before: Sequence[GroupRequest]) -> str:
        chances, places = self._chances(environment), self._places[environment]
        left = chances.copy()
        left[
            [places[each.task_id] for each in before if each.environment == environment and each.task_id in places]
        ] = 0
        chances = left / left.sum() if left.any() else chances
        random = np.random.default_rng((self._seed, sum(self._drawn), environment))
        return self._task_ids[environment][int(random.choice(len(chances), p=chances))]

    def note(self, sample: GroupSample) -> None:
        """Count the successes and failures of the rollouts that were played to the end."""
        place = self._places[sample.request.environment].get(sample.request.task_id)
        ended = [episode.success for episode in sample.episodes if not episode.failed]
        if place is not None and ended:  # the list of a resumed run may have changed
            counts = self._counts[sample.request.environment]
            counts[place] = DECAY * counts[place] + (sum(ended), len(ended) - sum(ended))

    def metrics(self) -> dict[str, float]:
        """Return the fraction of tasks played, the spread of the probabilities, and percentiles of played tasks' success rates."""
        shares = [
            self._shares[number] * self._chances(number) for number in range(len(self._shares)) if self._shares[number]
        ]
        counts = np.concatenate([each for each, share in zip(self._counts, self._shares, strict=True) if share])
        seen: np.ndarray = np.any(counts, axis=1)
        found = {
            "tasks/seen_fraction": float(seen.mean()),
            "tasks/effective_fraction": float(1 / (np.concatenate(shares) ** 2).sum() / len(seen)),
        }
        if seen.any():
            for percent in (10, 50, 90):
                found[f"tasks/success_rate_p{percent}"] = float(np.percentile(_rates(counts[seen]), percent))
        return found

    def get_state(self, in_flight: Sequence[GroupRequest] = ()) -> dict[str, Any]:
        """Return the state of the base class, and the counts of every task that was played."""
        played = [
            {task: counts[place].tolist() for task, place in places.items() if counts[place].any()}
            for places, counts in zip(self._places, self._counts, strict=True)
        ]
        return {**super().get_state(in_flight), "success_counts": played}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from a state of :meth:`get_state`; a state of uniform sampling has no counts."""
        super().set_state(state)
        played = state.get("success_counts", [{} for _ in self._places])
        for places, counts, known in zip(self._places, self._counts, played, strict=True):
            counts[:] = 0
            for task, place in places.items():
                counts[place] = known.get(task, (0.0, 0.0))

    def _chances(self, environment: int) -> np.ndarray:
        rates = _rates(self._counts[environment])
        variances = rates * (1 - rates)
        chances: np.ndarray = (1 - FLOOR) * variances / variances.sum() + FLOOR / len(rates)
        return chances


def _rates(counts: np.ndarray) -> np.ndarray:
    """Success rates ``[N]`` of counts ``[N, 2]``."""
    rates: np.ndarray = (counts[:, 0] + PRIOR) / (counts.sum(1) + 2 * PRIOR)
    return rates
