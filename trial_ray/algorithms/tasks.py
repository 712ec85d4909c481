"""Task samplers: shuffled passes over the tasks, or draws by the policy's success rate on each task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from trial_ray.errors import CheckpointError, ConfigError
from trial_ray.files import Json, Numbers
from trial_ray.rollout.episode import derive_seed
from trial_ray.rollout.groups import GroupRequest, GroupSample

PRIOR = 1.0
"""Initial number of successes and of failures of every task, so a task that was never played has a success rate of 1/2."""
DECAY = 0.5
"""Factor by which a task's numbers of successes and failures are multiplied before those of another group of rollouts are added."""
FLOOR = 0.1
"""Share of the probability that is distributed uniformly over all tasks."""


class TaskSampler:
    """Shuffled passes over the task list of each environment.

    The state is a seed, the number of tasks drawn from each environment, and the group requests that were put back. With several
    environments, the next task is from the environment that lags most behind its share. Therefore the number of tasks drawn from
    an environment always differs from its share of all draws by at most about one task.

    Args:
        task_ids: the split's tasks of each environment, in fixed order.
        seed: determines the order of every pass and the seeds of every group.
        weights: share of each environment, in any unit, 0 if no tasks are drawn from it; ``None`` for equal shares.

    Raises:
        ConfigError: an environment with a share has no tasks.
    """

    def __init__(self, task_ids: Sequence[Sequence[str]], seed: int, weights: Sequence[float] | None = None) -> None:
        weights = weights or [1.0] * len(task_ids)
        if not task_ids:
            raise ConfigError("No environment was chosen; set .environment(...).")
        if not all(listed for listed, weight in zip(task_ids, weights, strict=True) if weight):
            raise ConfigError("The training split has no tasks; choose another split in .environment(env_config=...).")
        self._task_ids = task_ids
        self._seed = seed
        self._shares = [weight / sum(weights) for weight in weights]
        self._drawn = [0] * len(task_ids)
        self._returned: list[GroupRequest] = []

    def draw(self, num_tasks: int, group_size: int) -> list[GroupRequest]:
        """Return requests for the next ``num_tasks`` groups, indexed from 0; requests that were put back come first."""
        put_back, self._returned = self._returned[:num_tasks], self._returned[num_tasks:]
        requests = [replace(request, index=index, group_size=group_size) for index, request in enumerate(put_back)]
        for index in range(len(requests), num_tasks):
            total = sum(self._drawn)
            lags = [share * (total + 1) - drawn for share, drawn in zip(self._shares, self._drawn, strict=True)]
            environment = lags.index(max(lags))
            task = self._next_task(environment, requests)
            seed = derive_seed(self._seed, "group", total)
            requests.append(GroupRequest(index, task, group_size, seed, environment))
            self._drawn[environment] += 1
        return requests

    def _next_task(self, environment: int, before: Sequence[GroupRequest]) -> str:
        """Return the next task of an environment; ``before`` has the earlier group requests of the same :meth:`draw`."""
        task_ids = self._task_ids[environment]
        passes, index_in_pass = divmod(self._drawn[environment], len(task_ids))
        key = (self._seed, passes, environment) if environment else (self._seed, passes)
        return task_ids[int(_order(key, len(task_ids))[index_in_pass])]

    def note(self, sample: GroupSample) -> None:
        """Record the result of a group that enters an update or is dropped; this class ignores it."""

    def metrics(self) -> Numbers:
        """Return metrics of the tasks by their keys in RLlib's result; this class has none."""
        return {}

    def put_back(self, requests: Sequence[GroupRequest]) -> None:
        """Put group requests back; they are drawn again, with their tasks and seeds, before all others."""
        self._returned = [*requests, *self._returned]

    def get_state(self, in_flight: Sequence[GroupRequest] = ()) -> Json:
        """Return the number of tasks drawn from each environment, the seed, and the group requests to draw again.

        Args:
            in_flight: requests that were drawn but not trained on; a resumed run draws them first.
        """
        returned = [
            {"task_id": request.task_id, "seed": request.seed, "environment": request.environment}
            for request in (*in_flight, *self._returned)
        ]
        return {"seed": self._seed, "drawn": list(self._drawn), "returned": returned}

    def set_state(self, state: Json) -> None:
        """Continue from a state of :meth:`get_state`.

        Raises:
            CheckpointError: the state has another number of environments.
        """
        drawn = state["drawn"]
        if not isinstance(drawn, list) or len(drawn) != len(self._task_ids):
            raise CheckpointError(
                f"The checkpoint has the tasks of other environments ({drawn!r}); the config has {len(self._task_ids)}."
            )
        self._seed, self._drawn = state["seed"], list(drawn)
        self._returned = [GroupRequest(index=0, group_size=0, **request) for request in state["returned"]]


class SuccessRateSampler(TaskSampler):
    """Draws a task in proportion to p (1 − p), the variance of its rollouts' success at success rate p, plus a uniform share.

    p is (s + 1) / (s + f + 2), where s and f are the numbers of rollouts that have solved and not solved the task; older rollouts
    have exponentially smaller weights in them. A call of ``draw`` draws a task twice only if no other task is left. The class takes
    the arguments and raises the errors of :class:`TaskSampler`.
    """

    def __init__(self, task_ids: Sequence[Sequence[str]], seed: int, weights: Sequence[float] | None = None) -> None:
        super().__init__(task_ids, seed, weights)
        self._places = [{task: place for place, task in enumerate(listed)} for listed in task_ids]
        self._counts = [np.zeros((len(listed), 2)) for listed in task_ids]  # Columns: successes, failures.

    def _next_task(self, environment: int, before: Sequence[GroupRequest]) -> str:
        probabilities, places = self._probabilities(environment), self._places[environment]
        drawn = [request.task_id for request in before if request.environment == environment]
        left = probabilities.copy()
        left[[places[task_id] for task_id in drawn if task_id in places]] = 0
        probabilities = left / left.sum() if left.any() else probabilities
        random = np.random.default_rng((self._seed, sum(self._drawn), environment))
        return self._task_ids[environment][int(random.choice(len(probabilities), p=probabilities))]

    def note(self, sample: GroupSample) -> None:
        """Count the successes and failures of the rollouts that were played to the end."""
        place = self._places[sample.request.environment].get(sample.request.task_id)
        ended = [episode.success for episode in sample.episodes if not episode.failed]
        if place is not None and ended:  # The task may be unknown: a resumed run may have another task list.
            counts = self._counts[sample.request.environment]
            counts[place] = DECAY * counts[place] + (sum(ended), len(ended) - sum(ended))

    def metrics(self) -> Numbers:
        """Return the fraction of tasks played, the effective fraction of tasks drawn, and percentiles of success rates.

        The effective fraction is 1 / (N Σ p²) for N tasks that are drawn with probabilities p.
        """
        shares = [share * self._probabilities(index) for index, share in enumerate(self._shares) if share]
        counts = np.concatenate([array for array, share in zip(self._counts, self._shares, strict=True) if share])
        seen: np.ndarray = np.any(counts, axis=1)
        metrics = {
            "tasks/seen_fraction": float(seen.mean()),
            "tasks/effective_fraction": float(1 / (np.concatenate(shares) ** 2).sum() / len(seen)),
        }
        if seen.any():
            for percent in (10, 50, 90):
                metrics[f"tasks/success_rate_p{percent}"] = float(np.percentile(_rates(counts[seen]), percent))
        return metrics

    def get_state(self, in_flight: Sequence[GroupRequest] = ()) -> Json:
        """Return the state of the base class, and the weighted numbers of successes and failures of every task that was played."""
        played = [
            {task: counts[place].tolist() for task, place in places.items() if counts[place].any()}
            for places, counts in zip(self._places, self._counts, strict=True)
        ]
        return {**super().get_state(in_flight), "success_counts": played}

    def set_state(self, state: Json) -> None:
        """Continue from a state of :meth:`get_state`; without successes and failures if it is from a :class:`TaskSampler`."""
        super().set_state(state)
        played = state.get("success_counts", [{} for _ in self._places])
        for places, counts, known in zip(self._places, self._counts, played, strict=True):
            counts[:] = 0
            for task, place in places.items():
                counts[place] = known.get(task, (0.0, 0.0))

    def _probabilities(self, environment: int) -> np.ndarray:
        rates = _rates(self._counts[environment])
        variances = rates * (1 - rates)
        return (1 - FLOOR) * variances / variances.sum() + FLOOR / len(rates)


def _rates(counts: np.ndarray) -> np.ndarray:
    """Return the success rates ``[N]`` of tasks from their numbers of successes and failures, ``[N, 2]``."""
    return (counts[:, 0] + PRIOR) / (counts.sum(1) + 2 * PRIOR)


@lru_cache(maxsize=8)
def _order(key: tuple[int, ...], number: int) -> np.ndarray:
    """Return the order of a pass over ``number`` tasks, a permutation that ``key`` determines."""
    return np.random.default_rng(key).permutation(number)
