"""What an iteration trains on: no group gets too old, none is lost or trained twice, failed ones drawn again, all rows counted."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from trial_ray.algorithms import GRPOConfig
from trial_ray.algorithms.sampling import MAX_LOSSES, GroupSampler, SampledBatch
from trial_ray.algorithms.tasks import SuccessRateSampler, TaskSampler
from trial_ray.errors import EnvironmentFaultError, InfrastructureError, PromptTooLongError
from trial_ray.evaluation.evaluation_sets import EvaluationSet
from trial_ray.evaluation.player import EvaluationPlayer
from trial_ray.rollout.groups import GroupRequest, GroupSample, RolloutCounts
from trial_ray.trajectory import EpisodeResult, Trajectory, TrajectoryGroup, Turn

T = 4
FEW = {"num_survivors": 1, "errors": ["EngineError: gone"]}


@dataclass
class Playing:
    request: GroupRequest
    runner: int
    versions: list[int]
    turns_left: int


@dataclass
class PlayedWorkers:
    """Env runners whose groups take a turn or none in each call, by chance; the real ones play in tests/e2e.

    Attributes:
        play: what of a group's sample is not as usual, by its request and how often its task has begun.
        dies: whether the runner of a group dies, by the same.
        stuck: tasks that never end.
        slow: tasks that take ten times as many turns as others.
    """

    seed: int = 0
    runners: tuple[int, ...] = (1, 2)
    version: int = 1
    play: Callable[[GroupRequest, int], dict[str, Any]] = lambda request, times: {}
    dies: Callable[[GroupRequest, int], bool] = lambda request, times: False
    stuck: set[str] = field(default_factory=set)
    slow: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.playing: dict[int, Playing] = {}
        self.rows_handed_out = 0
        self.begun: list[GroupRequest] = []

    def times(self, request: GroupRequest) -> int:
        return tasks_begun(self)[request.task_id]

    def begin_groups(self, requests, settings):
        for request in requests:
            assert request.index not in self.playing
            turns = 40 if request.task_id in self.slow else self.random.randint(1, 6)
            runner = self.runners[len(self.begun) % len(self.runners)]
            self.playing[request.index] = Playing(request, runner, [], turns)
            self.begun.append(request)
        return {request.index: self.playing[request.index].runner for request in requests}

    def take_groups(self, runner_ids, iteration, timeout_s, together):
        if together:
            assert runner_ids == {each.runner for each in self.playing.values()}, "the others have handed over theirs"
        dead = {each.runner for each in self.playing.values() if self.dies(each.request, self.times(each.request))}
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
        return samples, [*dead]

    def advance(self) -> None:
        for each in self.playing.values():
            if each.request.task_id not in self.stuck and self.random.random() < 0.7:
                each.versions.append(self.version)
                each.turns_left -= 1

    def _sample(self, each: Playing) -> GroupSample:
        rows, versions = 3 * len(each.versions), (min(each.versions), max(each.versions))
        usual = GroupSample(each.request, None, [], [], 4, rows, False, RolloutCounts(turns=rows), versions)
        return replace(usual, **self.play(each.request, self.times(each.request)))

    def stream_groups(self, requests, settings):
        self.begun += requests
        yield from [self._sample(Playing(request, 1, [1], 0)) for request in requests]

    def abandon_groups(self):
        self.playing = {}

    def abandon_late(self):
        late = {each.runner for each in self.playing.values()}
        self.abandon_groups()
        return [*late]

    def repair(self, again: int) -> None:
        """Nothing to repair."""

    def take_losses(self) -> list[str]:
        return []


def tasks_begun(workers: PlayedWorkers) -> Counter[str]:
    return Counter(request.task_id for request in workers.begun)


def sampler(workers: PlayedWorkers, max_staleness: int = 0, rollouts: Any = (), **training) -> GroupSampler:
    config = GRPOConfig().environment("trial/ALFWorld-v0").training(group_size=4, tasks_per_iteration=T, **training)
    config.env_runners(max_staleness=max_staleness, **dict(rollouts))
    return GroupSampler(config, new_tasks(), workers, lambda: workers.version)


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
@pytest.mark.parametrize("seed", range(3))
def test_no_group_gets_too_old_and_every_task_is_trained_once(max_staleness, seed):
    """The updates that slow groups may enter are few."""
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


def test_success_rates_are_those_of_the_groups_that_entered_and_go_on_after_a_resume():
    def play(request, times):
        return {"episodes": [EpisodeResult(request.task_id, "", request.seed % 2 == 0, 0.0, 1, "terminated")] * 4}

    def whole(workers):
        tasks = SuccessRateSampler([[f"task-{number}" for number in range(20)]], seed=0)
        config = GRPOConfig().training(group_size=4, tasks_per_iteration=T)
        return GroupSampler(config, tasks, workers, lambda: workers.version)

    workers = PlayedWorkers(play=play)
    first = whole(workers)
    batch = first.sample(1)
    assert first.get_state()["success_counts"] == [
        {
            each.request.task_id: [4.0 * each.episodes[0].success, 4.0 - 4.0 * each.episodes[0].success]
            for each in batch.kept
        }
    ]
    assert batch.metrics()["tasks/seen_fraction"] == T / 20
    resumed = whole(PlayedWorkers(seed=5, play=play))
    resumed.set_state(first.get_state())
    for iteration in range(2, 6):
        assert sorted(tasks_of(first.sample(iteration).kept)) == sorted(tasks_of(resumed.sample(iteration).kept))
        assert first.get_state() == resumed.get_state()


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


def test_a_small_effective_sample_size_holds_the_next_iteration_to_the_current_weights_also_in_a_resumed_run():
    workers = PlayedWorkers()
    limit = {"min_effective_sample_size": 0.4}
    overlapping = sampler(workers, 1, limit)
    first = tasks_of(overlapping.sample(1).kept)
    overlapping.note_effective_sample_size(0.39)
    update(workers)
    resumed = sampler(PlayedWorkers(), 1, limit)
    resumed.set_state(overlapping.get_state())
    assert resumed.sample(2).metrics()["groups/num_on_policy_iterations"] == 1
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
    assert waiting <= tasks_begun(workers).keys()


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_the_oldest_turn_decides_whether_a_group_is_too_old(max_staleness):
    """Of two groups with turns of the current weights, one has a turn of the oldest that are allowed, one of older ones."""
    at_bound, too_old = drawn(2)
    oldest = {at_bound: 1 - max_staleness, too_old: -max_staleness}

    def play(request, times):
        if request.task_id not in oldest:
            return {}
        turns = [Turn(weight_version=version) for version in (1, oldest[request.task_id], 1)]
        group = TrajectoryGroup(request.task_id, [Trajectory(request.task_id, "", 0, turns) for _ in range(4)])
        return vars_of(GroupSample.from_group(request, group, GRPOConfig()))

    batch = sampler(PlayedWorkers(play=play, slow=set(drawn(9)[T:])), max_staleness).sample(1)
    assert at_bound in tasks_of(batch.kept)
    assert too_old not in tasks_of(batch.kept)
    assert (batch.num_stale, batch.stale_rows) == (1, 12)


def test_without_staleness_a_small_effective_sample_size_changes_nothing(caplog):
    sampling = sampler(PlayedWorkers(), 0, {"min_effective_sample_size": 0.4})
    sampling.sample(1)
    sampling.note_effective_sample_size(0.1)
    assert caplog.text == ""
    assert sampling.sample(2).metrics()["groups/num_on_policy_iterations"] == 0


def test_a_sample_of_an_earlier_seed_is_not_that_of_the_group_drawn_again():
    """The first draw of a task fails, and is handed over once more as if it were complete."""
    task = drawn(1)[0]
    workers = PlayedWorkers(play=lambda request, times: FEW if (request.task_id, times) == (task, 1) else {})
    take_groups, late = workers.take_groups, []

    def handed_over_twice(*arguments, **named):
        samples, dead = take_groups(*arguments, **named)
        again = [late.pop()] if late else []
        late.extend(replace(each, num_survivors=4, errors=[]) for each in samples if each.num_survivors < 2)
        return again + samples, dead

    workers.take_groups = handed_over_twice
    batch = sampler(workers).sample(1)
    (kept,) = [sample for sample in batch.kept if sample.request.task_id == task]
    first, second = [request.seed for request in workers.begun if request.task_id == task]
    assert (kept.request.seed, late) == (second, [])
    assert first != second
    assert batch.metrics()["rows/sampled"] == batch.metrics()["rows/given_to_learners"] + batch.redrawn_rows


def test_groups_that_end_between_two_iterations_belong_to_the_next_one():
    """By the iteration with which env runners record them."""
    workers = PlayedWorkers()
    take_groups, iterations = workers.take_groups, []

    def noted(runners, iteration, *arguments, **named):
        iterations.append(iteration)
        return take_groups(runners, iteration, *arguments, **named)

    workers.take_groups = noted
    overlapping = sampler(workers, max_staleness=1)
    overlapping.sample(1)
    assert set(iterations) == {1}
    iterations.clear()
    overlapping.finish()
    assert set(iterations) == {2}


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_group_with_too_few_survivors_is_drawn_again_then_left_out_and_all_rows_are_counted(max_staleness):
    """No easier task takes its place. Two survivors are enough."""
    few, none, two = drawn(3)

    def play(request, times):
        if request.task_id == two:
            return FEW | {"num_survivors": 2}
        return FEW if request.task_id == none or (request.task_id, times) == (few, 1) else {}

    workers = PlayedWorkers(play=play)
    overlapping = sampler(workers, max_staleness, {"max_group_redraws": 2})
    kept, left_out, sampled, parts, redrawn = [], [], 0, 0, 0
    for iteration in range(1, 4):
        batch = overlapping.sample(iteration)
        kept += tasks_of(batch.kept)
        left_out += tasks_of(batch.left_out)
        rows = {name: count for name, count in batch.metrics().items() if name.startswith("rows/")}
        redrawn += rows["rows/redrawn"]
        sampled += rows.pop("rows/sampled")
        in_flight = rows.pop("rows/in_flight")
        parts += sum(rows.values())
        update(workers)
    assert sampled == parts + in_flight == workers.rows_handed_out
    assert redrawn > 0
    assert few in kept
    assert left_out == [none]
    assert len({request.seed for request in workers.begun if request.task_id == none}) == 3
    assert two in kept
    assert tasks_begun(workers)[two] == 1


def test_groups_of_dead_runners_are_played_again_with_their_seeds_also_those_that_had_ended():
    workers, dying = PlayedWorkers(), []
    workers.dies = lambda request, times: bool(dying)
    overlapping = sampler(workers, 1, {"max_group_redraws": 0})
    trained = tasks_of(overlapping.sample(1).kept)
    overlapping.finish()
    lost = {group.request.task_id for group in overlapping._in_flight.values()}
    workers.playing = {
        index: Playing(each.request, each.runner, [], 1) for index, each in overlapping._in_flight.items()
    }
    workers.version = 2
    dying.append(True)
    overlapping._take_in_until(lambda: dying.pop())
    trained += tasks_of(overlapping.sample(2).kept)
    workers.version += 1
    trained += tasks_of(overlapping.sample(3).kept)
    assert len(set(trained)) == 3 * T
    begun = tasks_begun(workers)
    assert all(begun[task] == 2 for task in lost)
    assert len({(request.task_id, request.seed) for request in workers.begun}) == len(begun)


def test_a_lost_group_is_played_again_with_its_seed_and_a_failed_one_with_another_each_only_so_often(caplog):
    """The second is lost four times, the third fails and is lost after that, the last is lost each time."""
    tasks = drawn(4)
    lost = {(tasks[1], times) for times in range(1, 5)} | {(tasks[2], 2)}
    workers = PlayedWorkers(
        runners=tuple(range(100)),
        play=lambda request, times: FEW if (request.task_id, times) == (tasks[2], 1) else {},
        dies=lambda request, times: request.task_id == tasks[3] or (request.task_id, times) in lost,
    )
    kept = sampler(workers, rollouts={"max_group_redraws": 1}).sample(1).kept
    assert sorted(tasks_of(kept)) == sorted(tasks[:3])
    seeds = [[request.seed for request in workers.begun if request.task_id == task] for task in tasks]
    assert [len(each) for each in seeds] == [1, 5, 3, 1 + MAX_LOSSES]
    assert [len({*each}) for each in seeds] == [1, 1, 2, 1]
    assert seeds[2][1] == seeds[2][2]
    assert "its env runners were lost 6 times" in caplog.text


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


def gone(*arguments: Any) -> None:
    raise InfrastructureError("gone")


@pytest.mark.parametrize("call", ["begin_groups", "take_groups", "repair"])
@pytest.mark.parametrize("evaluating", [False, True])
def test_every_group_is_redrawn_after_an_infrastructure_error(call, evaluating, monkeypatch):
    """An evaluation waits for the groups in flight as well."""
    workers, dying = PlayedWorkers(seed=3), []
    workers.dies = lambda request, times: bool(dying)
    sampling = sampler(workers, max_staleness=1)
    first = sampling.sample(1)
    waiting = {each["task_id"] for each in sampling.get_state()["returned"]}
    workers.begun = []
    with monkeypatch.context() as broken:
        broken.setattr(workers, call, gone)
        dying.append(True)  # Groups that are lost begin again after a repair.
        with pytest.raises(InfrastructureError, match="gone"):
            sampling.finish() if evaluating else sampling.sample(2)
    dying.clear()
    assert workers.playing == {}
    workers.version += 1
    batch = sampling.sample(2)
    assert waiting <= {request.task_id for request in workers.begun}
    assert len(batch.kept) == T
    left = [each["task_id"] for each in sampling.get_state()["returned"]]
    assert sorted([*tasks_of(first.kept), *tasks_of(batch.kept), *left]) == sorted(drawn(3 * T))
    counts = [each.metrics() for each in (first, batch)]
    assert sum(each["rows/sampled"] for each in counts) == workers.rows_handed_out


def test_an_error_in_a_refill_redraws_the_groups_that_were_kept(monkeypatch):
    """Their rows are counted as redrawn."""
    workers = PlayedWorkers(play=lambda request, times: {"zero_variance": request.task_id == drawn(1)[0]})
    sampling = sampler(workers, drop_zero_variance_groups=True, max_refills=1)
    begin, begun = workers.begin_groups, []

    def begin_once(requests, settings):
        begun.append(requests)
        return begin(requests, settings) if len(begun) != 2 else gone()

    monkeypatch.setattr(workers, "begin_groups", begin_once)
    with pytest.raises(InfrastructureError, match="gone"):
        sampling.sample(1)
    rows = workers.rows_handed_out
    assert rows > 0
    batch = sampling.sample(1)
    assert sorted(tasks_of([*batch.kept, *batch.left_out])) == sorted(drawn(T + 1))
    assert batch.metrics()["rows/redrawn"] == rows
    assert batch.metrics()["rows/sampled"] == workers.rows_handed_out


def test_finished_groups_of_a_runner_that_was_ended_are_played_again():
    """A runner is ended because another of its groups does not end in time."""
    workers = PlayedWorkers(runners=(1,), stuck={drawn(T + 1)[-1]})
    sampling = sampler(workers, max_staleness=1)
    trained = tasks_of(sampling.sample(1).kept)
    finished = {group.request.task_id for group in sampling._in_flight.values() if group.finished}
    sampling._workers.begun = []
    abandon_late = workers.abandon_late

    def freed():
        workers.stuck = set()
        return abandon_late()

    workers.abandon_late = freed
    sampling.finish()
    assert finished <= tasks_begun(workers).keys()
    for iteration in (2, 3):
        workers.version += 1
        trained += tasks_of(sampling.sample(iteration).kept)
    assert len({*trained}) == len(trained) == 3 * T


@pytest.mark.parametrize("resumed", [False, True])
def test_rows_of_groups_that_are_given_up_are_counted(resumed):
    """By weights that a user sets, or by the end of the driver."""
    workers = PlayedWorkers(seed=3)  # some have ended
    sampling = sampler(workers, max_staleness=1)
    first = sampling.sample(1)
    if resumed:
        state, sampling = sampling.get_state(), sampler(workers, max_staleness=1)
        sampling.set_state(state)
    else:
        sampling.finish()
        sampling.restart()
    batches = [first, sampling.sample(2)]
    rows = [{name: count for name, count in each.metrics().items() if name.startswith("rows/")} for each in batches]
    sampled, in_flight = sum(each.pop("rows/sampled") for each in rows), [each.pop("rows/in_flight") for each in rows]
    assert sampled == workers.rows_handed_out == sum(sum(each.values()) for each in rows) + in_flight[-1]
    assert sum(each.counts[0].turns for each in batches) == sampled
    assert rows[1]["rows/redrawn"] >= in_flight[0] > 0


def test_groups_that_never_end_stop_the_run():
    workers = PlayedWorkers(stuck=set(drawn(T * 2)))
    sampling = sampler(workers, max_staleness=1)
    with pytest.raises(InfrastructureError, match="No group of rollouts survived iteration 1"):
        sampling.sample(1)
    assert len(workers.begun) == (1 + MAX_LOSSES) * 2 * T
    # The cause may be gone when the caller tries again.
    workers.stuck = set()
    assert len(sampling.sample(1).kept) == T


@pytest.mark.parametrize(
    ("failed_by", "expected"),
    [
        (("environment", "environment"), EnvironmentFaultError),
        (("environment", "engine"), InfrastructureError),
        (("engine", "engine"), InfrastructureError),
    ],
)
def test_only_a_field_says_whose_failures_ended_an_iteration(failed_by, expected):
    """A restart of the run cures engines, not environments; an error's text may read in any way."""

    def play(request, times):
        error = "EnvironmentFaultError: quoted by an engine"
        failed = [Trajectory(request.task_id, "", 0, ended="failed", error=error, failed_by=each) for each in failed_by]
        return vars_of(GroupSample.from_group(request, TrajectoryGroup(request.task_id, failed), GRPOConfig()))

    sampling = sampler(workers := PlayedWorkers(play=play))
    with pytest.raises(InfrastructureError, match="No group of rollouts survived iteration 1") as caught:
        sampling.sample(1)
    assert type(caught.value) is expected
    (entry,) = sampling._config.environment_entries()
    with pytest.raises(InfrastructureError, match="the evaluation set's 2 episodes could not be") as caught:
        EvaluationPlayer(sampling._config, workers).play(EvaluationSet("trial/ALFWorld-v0", "train", ("a", "b")), entry)
    assert type(caught.value) is expected


def vars_of(sample: GroupSample) -> dict[str, Any]:
    return {name: getattr(sample, name) for name in GroupSample.__dataclass_fields__}


def test_a_task_whose_first_prompt_does_not_fit_is_counted_and_not_played_again_and_where_none_fits_the_run_stops(
    caplog,
):
    def play(request, times):
        return {**FEW, "num_survivors": 0, "errors": [], "too_long": f"task {request.task_id!r}, turn 1: 99"}

    first = drawn(1)[0]
    workers = PlayedWorkers(play=lambda request, times: play(request, times) if request.task_id == first else {})
    batch = sampler(workers).sample(1)
    assert (len(batch.kept), tasks_of(batch.left_out), len(workers.begun)) == (3, [first], T)
    assert batch.metrics()["groups/num_too_long"] == 1
    assert batch.left_out[0].too_long in caplog.text
    with pytest.raises(PromptTooLongError, match=r"all 4 tasks of iteration 1 do not fit \('task-.*turn 1: 99"):
        sampler(PlayedWorkers(play=play)).sample(1)
    mixed = PlayedWorkers(play=lambda request, times: play(request, times) if request.task_id == first else FEW)
    with pytest.raises(InfrastructureError, match="EngineError: gone"):
        sampler(mixed).sample(1)


def test_groups_without_variance_are_kept_or_left_out_and_refilled_until_the_batch_is_full():
    """Of four tasks two are dead, of the two drawn in their place one, of the last none."""
    dead = {*drawn(2), drawn(5)[4]}
    workers = PlayedWorkers(play=lambda request, times: {"zero_variance": request.task_id in dead, "num_rows": 7})
    assert len(sampler(workers).sample(1).kept) == T
    for refills, kept, left_out, refilled in ((0, 2, 2, 0), (5, 4, 3, 3)):
        batch = sampler(workers, drop_zero_variance_groups=True, max_refills=refills).sample(1)
        assert (len(batch.kept), len(batch.left_out), batch.num_refilled) == (kept, left_out, refilled)
        metrics = batch.metrics()
        rows = tuple(metrics[f"rows/{name}"] for name in ("sampled", "given_to_learners", "left_out"))
        assert rows == (7 * (kept + left_out), 7 * kept, 7 * left_out)
        assert len(set(tasks_of([*batch.kept, *batch.left_out]))) == kept + left_out
    workers.play = lambda request, times: {"zero_variance": True}
    batch = sampler(workers, drop_zero_variance_groups=True, max_refills=2).sample(1)
    assert batch.kept == []
    assert "in 12 groups every rollout earned the same reward" in batch.reason
    assert batch.metrics()["groups/num_empty_iterations"] == 1


def test_groups_that_begin_differently_are_counted_and_warned_of_once(caplog):
    workers = PlayedWorkers(play=lambda request, times: {"starts_differ": request.task_id != drawn(1)[0]})
    draw = sampler(workers)
    assert draw.sample(1).metrics()["groups/unequal_start_fraction"] == (T - 1) / T
    draw.sample(2)
    assert ["begin with different observations" in record.message for record in caplog.records].count(True) == 1


def test_the_share_of_groups_without_variance_is_of_those_whose_rewards_could_differ():
    def sample(survivors, zero_variance):
        return GroupSample(
            GroupRequest(0, "task", 4, 0), None, [], [], survivors, 10, zero_variance, RolloutCounts(turns=10)
        )

    lost = [sample(survivors, True) for survivors in (0, 1)]
    batch = SampledBatch([sample(4, False), sample(4, True)], lost)
    assert batch.metrics()["groups/zero_variance_fraction"] == 0.5
    assert "groups/zero_variance_fraction" not in SampledBatch([], lost).metrics()
