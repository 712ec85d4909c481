"""Sampling ahead of the learner: no group gets too old, none is lost or trained twice, all rows are counted."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest

from trial_ray.algorithms import GRPOConfig
from trial_ray.algorithms.sampling import MAX_LOSSES, GroupSampler
from trial_ray.algorithms.task_sampler import TaskSampler
from trial_ray.errors import InfrastructureError
from trial_ray.rollout.groups import GroupRequest, GroupSample, RolloutCounts

T = 4


@dataclass
class Playing:
    request: GroupRequest
    runner: int
    versions: list[int]
    turns_left: int


@dataclass
class PlayedWorkers:
    """Env runners whose groups take a turn or none in each call, by chance; the real ones play in tests/e2e."""

    seed: int = 0
    runners: tuple[int, ...] = (1, 2)
    version: int = 1
    survivors: dict[str, list[int]] = field(default_factory=dict)
    stuck: set[str] = field(default_factory=set)
    dying: set[int] = field(default_factory=set)
    slow: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.playing: dict[int, Playing] = {}
        self.rows_handed_out = 0
        self.begun: list[GroupRequest] = []

    def begin_groups(self, requests, settings):
        for request in requests:
            assert request.index not in self.playing
            turns = 40 if request.task_id in self.slow else self.random.randint(1, 6)
            runner = self.runners[len(self.begun) % len(self.runners)]
            self.playing[request.index] = Playing(request, runner, [], turns)
            self.begun.append(request)
        return {request.index: self.playing[request.index].runner for request in requests}

    def take_groups(self, runner_ids, iteration, timeout_s, together):
        dead = [runner for runner in self.dying if runner in runner_ids]
        self.dying -= set(dead)
        self.playing = {index: each for index, each in self.playing.items() if each.runner not in dead}
        for _ in range(100):  # none ends within the time where one is stuck
            self.advance()
            if not timeout_s or dead or any(each.turns_left <= 0 for each in self.playing.values()):
                break
        ended = [each for each in self.playing.values() if each.turns_left <= 0]
        for each in ended:
            del self.playing[each.request.index]
        samples = [self._sample(each) for each in ended]
        self.rows_handed_out += sum(sample.num_rows for sample in samples)
        return samples, dead

    def advance(self) -> None:
        for each in self.playing.values():
            if each.request.task_id not in self.stuck and self.random.random() < 0.7:
                each.versions.append(self.version)
                each.turns_left -= 1

    def _sample(self, each: Playing) -> GroupSample:
        request, versions = each.request, each.versions
        survivors = self.survivors.get(request.task_id, [4])
        alive = survivors.pop(0) if len(survivors) > 1 else survivors[0]
        rows = 3 * len(versions) if alive else 0
        errors = [] if alive == 4 else ["EngineError: gone"]
        return GroupSample(
            request, None, [], errors, alive, rows, False, RolloutCounts(), (min(versions), max(versions))
        )

    def abandon_groups(self):
        indices = list(self.playing)
        self.playing = {}
        return indices

    def abandon_late(self):
        return self.abandon_groups()

    def repair(self, again: int) -> None:
        """Nothing to repair."""

    def take_losses(self) -> list[str]:
        return []


def sampler(workers: PlayedWorkers, max_staleness: int, tasks: TaskSampler | None = None, **rollouts) -> GroupSampler:
    config = GRPOConfig().environment("trial/ALFWorld-v0").training(group_size=4, tasks_per_iteration=T)
    config.env_runners(max_staleness=max_staleness, **rollouts)
    return GroupSampler(config, tasks or new_tasks(), workers, lambda: workers.version)


def new_tasks() -> TaskSampler:
    return TaskSampler([[f"task-{number}" for number in range(1000)]], seed=0)


def tasks_of(samples) -> list[str]:
    return [sample.request.task_id for sample in samples]


def drawn(count: int) -> list[str]:
    return [request.task_id for request in new_tasks().draw(count, 4)]


def update(workers: PlayedWorkers) -> None:
    """The learner updates while the env runners play on; then the weights change."""
    for _ in range(workers.random.randint(0, 4)):
        workers.advance()
    workers.version += 1


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_no_group_gets_too_old_and_every_task_is_trained_once(max_staleness, seed):
    """Some groups take ten times as many turns as others; the updates that they may enter are few."""
    workers = PlayedWorkers(seed, slow=set(drawn(60)[::7]))
    overlapping = sampler(workers, max_staleness)
    trained, in_flight, oldest, mixed = [], 0, 0, 0
    for iteration in range(1, 13):
        batch = overlapping.sample(iteration)
        assert len(batch.kept) == T
        ages = [workers.version - sample.weight_versions[0] for sample in batch.kept]
        assert max(ages) <= max_staleness
        oldest = max(oldest, *ages)
        trained += tasks_of(batch.kept)
        counts = batch.metrics()
        assert counts["groups/num_stale"] == 0
        assert counts["groups/num_in_flight"] == T * max_staleness
        mixed += counts["groups/num_of_several_versions"]
        in_flight += counts["rows/sampled"] - counts["rows/given_to_learners"]
        assert in_flight == counts["rows/in_flight"]
        update(workers)
    assert oldest == max_staleness
    assert (mixed > 0) == (max_staleness > 0)
    assert len(set(trained)) == len(trained)
    waiting = [request["task_id"] for request in overlapping.get_state()["returned"]]
    assert sorted(trained + waiting) == sorted(drawn(T * (12 + max_staleness)))


def test_an_update_does_not_wait_for_a_group_that_may_enter_a_later_one():
    workers = PlayedWorkers(slow={drawn(1)[0]})
    overlapping = sampler(workers, max_staleness=1)
    first = overlapping.sample(1)
    assert drawn(1)[0] not in tasks_of(first.kept)
    workers.version += 1
    assert drawn(1)[0] in tasks_of(overlapping.sample(2).kept), "the last update that it may enter waits for it"


def test_tasks_of_an_interrupted_and_resumed_run_are_trained_once():
    workers = PlayedWorkers()
    overlapping = sampler(workers, max_staleness=1)
    trained = []
    for iteration in range(1, 4):
        trained += tasks_of(overlapping.sample(iteration).kept)
        update(workers)
    state = overlapping.get_state()
    seeds = {request.task_id: request.seed for request in workers.begun}
    overlapping.sample(4)  # lost with the interruption

    for resumed_workers, resumed in [(workers, overlapping), (fresh := PlayedWorkers(seed=9), sampler(fresh, 1))]:
        resumed_workers.begun = []
        resumed.set_state(state)
        again = list(trained)
        for iteration in range(4, 8):
            again += tasks_of(resumed.sample(iteration).kept)
            update(resumed_workers)
        waiting = [request["task_id"] for request in resumed.get_state()["returned"]]
        assert sorted(again + waiting) == sorted(drawn(T * 8))
        assert len(set(again)) == 7 * T
        replayed = resumed_workers.begun[:T]
        assert {request.task_id for request in replayed} == {each["task_id"] for each in state["returned"]}
        assert all(request.seed == seeds[request.task_id] for request in replayed)


def test_a_small_effective_sample_size_holds_the_next_iteration_to_the_current_weights():
    workers = PlayedWorkers()
    overlapping = sampler(workers, max_staleness=1, min_effective_sample_size=0.4)
    first = tasks_of(overlapping.sample(1).kept)
    overlapping.note_effective_sample_size(0.39)
    update(workers)
    second = overlapping.sample(2)
    assert all(sample.weight_versions == (2, 2) for sample in second.kept)
    metrics = second.metrics()
    assert metrics["groups/num_on_policy_iterations"] == 1
    assert metrics["groups/num_stale"] == T
    assert metrics["groups/num_in_flight"] == 0
    assert sorted(first + tasks_of(second.kept)) == sorted(drawn(2 * T))
    overlapping.note_effective_sample_size(0.4)
    update(workers)
    third = overlapping.sample(3).metrics()
    assert (third["groups/num_on_policy_iterations"], third["groups/num_in_flight"]) == (0, T)


def test_groups_that_are_too_old_all_the_same_are_dropped_counted_and_played_again():
    workers = PlayedWorkers()
    overlapping = sampler(workers, max_staleness=1)
    overlapping.sample(1)
    overlapping.finish()
    waiting = {each["task_id"] for each in overlapping.get_state()["returned"]}
    for group in overlapping._in_flight.values():
        group.sample = replace(group.sample, weight_versions=(-1, 1))
    workers.version += 1
    old = overlapping.sample(2)
    assert (old.num_stale, old.metrics()["rows/given_to_learners"]) == (T, 0)
    assert old.stale_rows > 0
    assert "groups/zero_variance_fraction" not in old.metrics(), "of no group"
    workers.version += 1
    workers.begun = []
    overlapping.sample(3)
    assert waiting <= {request.task_id for request in workers.begun}


def test_a_group_with_too_few_survivors_is_drawn_again_then_left_out_and_all_rows_are_counted():
    few, none = drawn(2)
    workers = PlayedWorkers(survivors={few: [1, 4], none: [1]})
    overlapping = sampler(workers, max_staleness=1, max_group_redraws=2)
    kept, left_out, sampled, parts = [], [], 0, 0
    for iteration in range(1, 4):
        batch = overlapping.sample(iteration)
        kept += tasks_of(batch.kept)
        left_out += tasks_of(batch.left_out)
        rows = {name: count for name, count in batch.metrics().items() if name.startswith("rows/")}
        sampled += rows.pop("rows/sampled")
        in_flight = rows.pop("rows/in_flight")
        parts += sum(rows.values())
        update(workers)
    assert sampled == parts + in_flight == workers.rows_handed_out
    assert few in kept
    assert left_out == [none]
    assert len({request.seed for request in workers.begun if request.task_id == none}) == 3


def test_groups_of_dead_runners_are_played_again_with_their_seeds_also_those_that_had_ended():
    workers = PlayedWorkers()
    overlapping = sampler(workers, max_staleness=1, max_group_redraws=0)
    trained = tasks_of(overlapping.sample(1).kept)
    overlapping.finish()
    lost = {group.request.task_id for group in overlapping._in_flight.values() if group.runner == 1}
    assert len(lost) == T // 2
    workers.version = 2
    for _ in range(3):
        workers.dying = {1, 2}
        overlapping.finish()
        overlapping._take_in_until(lambda: not workers.dying)
    trained += tasks_of(overlapping.sample(2).kept)
    workers.version += 1
    trained += tasks_of(overlapping.sample(3).kept)
    assert len(set(trained)) == 3 * T
    begun = Counter(request.task_id for request in workers.begun)
    assert all(begun[task] > 3 for task in lost)
    assert len({(request.task_id, request.seed) for request in workers.begun}) == len(begun)


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_what_a_runner_raises_gives_up_what_is_played_and_the_next_iteration_plays_it_again(max_staleness, monkeypatch):
    workers = PlayedWorkers()
    sampling = sampler(workers, max_staleness)
    with monkeypatch.context() as broken:
        broken.setattr(workers, "advance", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            sampling.sample(1)
    assert workers.playing == {}
    first = {(request.task_id, request.seed) for request in workers.begun}
    workers.begun = []
    assert len(sampling.sample(1).kept) == T
    assert {(request.task_id, request.seed) for request in workers.begun} == first


def test_groups_that_never_end_stop_the_run():
    workers = PlayedWorkers(stuck=set(drawn(T * 2)))
    overlapping = sampler(workers, max_staleness=1)
    with pytest.raises(InfrastructureError, match="No group of rollouts survived iteration 1"):
        overlapping.sample(1)
    assert len(workers.begun) == (1 + MAX_LOSSES) * 2 * T
