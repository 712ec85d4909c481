"""What an iteration trains on: lost groups are drawn again, groups without variance are left out and refilled, all counted."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from trial_ray.algorithms import GRPOConfig
from trial_ray.algorithms.batch_sampler import BatchSampler
from trial_ray.algorithms.task_sampler import TaskSampler
from trial_ray.errors import InfrastructureError
from trial_ray.rollout.requests import GroupRequest, GroupSample


class PlayedWorkers:
    """Answers every request by a rule; the real runners play in tests/e2e."""

    def __init__(self, play: Callable[[GroupRequest, int], GroupSample]) -> None:
        self._play = play
        self.calls = 0

    def sample_groups(self, requests, settings):
        self.calls += 1
        return [([self._play(request, self.calls) for request in requests], {})]

    def repair(self) -> None:
        """Nothing to repair."""

    def take_losses(self) -> list[str]:
        return []


def sample_of(request: GroupRequest, survivors: int = 4, zero_variance: bool = False, rows: int = 10) -> GroupSample:
    errors = [] if survivors == 4 else ["EngineError: gone"]
    return GroupSample(request, None, [], errors, survivors, rows, zero_variance)


def sampler(play, **training) -> tuple[BatchSampler, PlayedWorkers]:
    config = GRPOConfig().environment("trial/ALFWorld-v0").training(group_size=4, tasks_per_iteration=4, **training)
    workers = PlayedWorkers(play)
    tasks = TaskSampler([[f"task-{number}" for number in range(100)]], seed=0)
    return BatchSampler(config, tasks, workers, lambda metrics: None), workers


def _counted(counts: dict[str, float]) -> dict[str, float]:
    return {name: count for name, count in counts.items() if count}


def adds_up(rows: dict[str, float]) -> bool:
    return rows["sampled"] == rows["given_to_learners"] + rows["left_out"] + rows["redrawn"]


def test_groups_without_variance_are_kept_unless_they_are_to_be_dropped():
    dead_first = lambda request, call: sample_of(request, zero_variance=request.index == 0)  # noqa: E731
    kept = sampler(dead_first)[0].sample(1)
    assert (len(kept.kept), len(kept.left_out)) == (4, 0)
    dropped = sampler(dead_first, drop_zero_variance_groups=True)[0].sample(1)
    assert (len(dropped.kept), len(dropped.left_out), dropped.num_refilled) == (3, 1, 0)
    assert adds_up(dropped.metrics()["rows"])


def test_refills_draw_new_tasks_until_the_batch_is_full():
    """Of four tasks two are dead, of the two drawn in their place one, of the last none."""
    seen = []

    def play(request, call):
        seen.append(request.task_id)
        return sample_of(request, zero_variance=request.index % 2 == 0 and call < 3, rows=7)

    filler, workers = sampler(play, drop_zero_variance_groups=True, max_refills=5)
    batch = filler.sample(1)
    assert (len(batch.kept), len(batch.left_out), batch.num_refilled, workers.calls) == (4, 3, 3, 3)
    assert len(set(seen)) == 7
    metrics = batch.metrics()
    assert _counted(metrics["groups"]) == {"num_trained": 4, "num_dropped": 3, "num_refilled": 3}
    assert _counted(metrics["rows"]) == {"sampled": 49, "given_to_learners": 28, "left_out": 21}


def test_refills_end_and_an_iteration_that_trains_nothing_says_why():
    filler, workers = sampler(
        lambda request, call: sample_of(request, zero_variance=True), drop_zero_variance_groups=True, max_refills=2
    )
    batch = filler.sample(1)
    assert (workers.calls, batch.kept) == (3, [])
    assert "in 12 groups every rollout earned the same reward" in batch.reason
    assert batch.metrics()["groups"]["num_empty_iterations"] == 1


def test_a_group_with_too_few_survivors_is_drawn_again_and_its_rows_are_counted():
    def play(request, call):
        return sample_of(request, survivors=1 if request.index == 2 and call == 1 else 4, rows=3)

    batch = sampler(play)[0].sample(1)
    assert len(batch.kept) == 4
    assert _counted(batch.metrics()["rows"]) == {"sampled": 15, "given_to_learners": 12, "redrawn": 3}


def test_a_batch_without_any_survivor_stops_the_run_with_the_first_cause():
    filler, _ = sampler(lambda request, call: sample_of(request, survivors=0, rows=0))
    with pytest.raises(InfrastructureError, match=r"iteration 7.*EngineError: gone"):
        filler.sample(7)
