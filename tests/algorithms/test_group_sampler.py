"""The groups of an iteration: none is too old, lost or trained twice, failed groups are redrawn, and all rows are counted."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from trial_ray.algorithms import GRPOConfig
from trial_ray.algorithms.sampled_batch import SampledBatch
from trial_ray.algorithms.sampling import MAX_LOSSES, GroupSampler
from trial_ray.algorithms.tasks import SuccessRateSampler, TaskSampler
from trial_ray.errors import EnvironmentFaultError, InfrastructureError, PromptTooLongError
from trial_ray.evaluation.evaluation_sets import EvaluationSet
from trial_ray.evaluation.player import EvaluationPlayer
from trial_ray.rollout.groups import GroupRequest, GroupSample, RolloutCounts
from trial_ray.trajectory import EpisodeResult, Trajectory, TrajectoryGroup, Turn

T = 4
FEW = {"num_survivors": 1, "errors": ["EngineError: gone"]}


@dataclass(eq=False)
class Playing:
    request: GroupRequest
    runner: int
    versions: list[int]
    turns_left: int


@dataclass
class FakePool:
    """Env runners whose groups take a turn or none in each call, by chance; the real ones play in tests/e2e.

    Attributes:
        play: what of a group's sample is not as usual, by its request and how often its task has started.
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
        self.playing: list[Playing] = []
        self.rows_handed_out = 0
        self.started: list[GroupRequest] = []
        self.recorded: list[tuple[int, GroupSample]] = []

    def times(self, request: GroupRequest) -> int:
        return starts_of(self)[request.task_id]

    def submit(self, requests, settings, playing=()):
        assert {*playing} == {*self.playing}
        for request in requests:
            assert request.index not in [each.request.index for each in self.playing]
            turns = 40 if request.task_id in self.slow else self.random.randint(1, 6)
            runner = self.runners[len(self.started) % len(self.runners)]
            self.playing.append(Playing(request, runner, [], turns))
            self.started.append(request)
        return self.playing[len(self.playing) - len(requests) :]

    def wait(self, playing, timeout_s):
        assert {*playing} == {*self.playing}
        dead = {each.runner for each in self.playing if self.dies(each.request, self.times(each.request))}
        self.playing = [each for each in self.playing if each.runner not in dead]
        for _ in range(100):  # none ends within the time where one is stuck
            self.advance()
            if not timeout_s or dead or any(each.turns_left <= 0 for each in self.playing):
                break
        samples = {each: self._sample(each) for each in self.playing if each.turns_left <= 0}
        self.playing = [each for each in self.playing if each not in samples]
        self.rows_handed_out += sum(sample.num_rows for sample in samples.values())
        return samples, dead

    def advance(self) -> None:
        for each in self.playing:
            if each.request.task_id not in self.stuck and self.random.random() < 0.7:
                each.versions.append(self.version)
                each.turns_left -= 1

    def _sample(self, each: Playing) -> GroupSample:
        rows, versions = 3 * len(each.versions), (min(each.versions), max(each.versions))
        usual = GroupSample(each.request, None, [], [], 4, rows, False, RolloutCounts(turns=rows), versions)
        return replace(usual, **self.play(each.request, self.times(each.request)))

    def stream_groups(self, requests, settings):
        self.started += requests
        yield from [self._sample(Playing(request, 1, [1], 0)) for request in requests]

    def cancel(self, playing):
        assert {*playing} >= {*self.playing}
        self.playing = []

    def replace_late(self, playing):
        self.cancel(playing)
        return {each.runner for each in playing}

    def record(self, iteration, samples):
        self.recorded += [(iteration, sample) for sample in samples]

    def repair(self, again: int) -> None:
        """Nothing to repair."""

    def pop_losses(self) -> list[str]:
        return []


def starts_of(pool: FakePool) -> Counter[str]:
    return Counter(request.task_id for request in pool.started)


def sampler(pool: FakePool, max_staleness: int = 0, rollouts: Any = (), **training) -> GroupSampler:
    config = GRPOConfig().environment("trial/ALFWorld-v0").training(group_size=4, tasks_per_iteration=T, **training)
    config.env_runners(max_staleness=max_staleness, **dict(rollouts))
    return GroupSampler(config, new_tasks(), pool, lambda: pool.version)


def new_tasks() -> TaskSampler:
    return TaskSampler([[f"task-{number}" for number in range(1000)]], seed=0)


def tasks_of(samples) -> list[str]:
    return [sample.request.task_id for sample in samples]


def drawn(count: int) -> list[str]:
    return [request.task_id for request in new_tasks().draw(count, 4)]


def update(pool: FakePool) -> None:
    """The learner updates while the env runners play on; then the weights change."""
    for _ in range(pool.random.randint(0, 4)):
        pool.advance()
    pool.version += 1


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_no_group_gets_too_old_and_every_task_is_trained_once(max_staleness, seed):
    """The updates that slow groups may enter are few."""
    pool = FakePool(seed, slow=set(drawn(60)[::7]))
    overlapping = sampler(pool, max_staleness)
    trained, in_flight, oldest, mixed = [], 0, 0, 0
    for iteration in range(1, 13):
        batch = overlapping.sample(iteration)
        assert len(batch.kept) == T
        ages = [pool.version - sample.weight_versions[0] for sample in batch.kept]
        assert max(ages) <= max_staleness
        oldest = max(oldest, *ages)
        trained += tasks_of(batch.kept)
        counts = batch.metrics()
        assert counts["groups/num_stale"] == 0
        assert counts["groups/num_in_flight"] == T * max_staleness
        mixed += counts["groups/num_of_several_versions"]
        in_flight += counts["rows/sampled"] - counts["rows/given_to_learners"]
        assert in_flight == counts["rows/in_flight"]
        update(pool)
    assert oldest == max_staleness
    assert (mixed > 0) == (max_staleness > 0)
    assert len(set(trained)) == len(trained)
    waiting = [request["task_id"] for request in overlapping.get_state()["returned"]]
    assert sorted(trained + waiting) == sorted(drawn(T * (12 + max_staleness)))


def test_success_rates_of_entered_groups_continue_after_a_resume():
    def play(request, times):
        return {"episodes": [EpisodeResult(request.task_id, "", request.seed % 2 == 0, 0.0, 1, "terminated")] * 4}

    def whole(pool):
        tasks = SuccessRateSampler([[f"task-{number}" for number in range(20)]], seed=0)
        config = GRPOConfig().training(group_size=4, tasks_per_iteration=T)
        return GroupSampler(config, tasks, pool, lambda: pool.version)

    pool = FakePool(play=play)
    first = whole(pool)
    batch = first.sample(1)
    assert first.get_state()["success_counts"] == [
        {
            each.request.task_id: [4.0 * each.episodes[0].success, 4.0 - 4.0 * each.episodes[0].success]
            for each in batch.kept
        }
    ]
    assert batch.metrics()["tasks/seen_fraction"] == T / 20
    resumed = whole(FakePool(seed=5, play=play))
    resumed.set_state(first.get_state())
    for iteration in range(2, 6):
        assert sorted(tasks_of(first.sample(iteration).kept)) == sorted(tasks_of(resumed.sample(iteration).kept))
        assert first.get_state() == resumed.get_state()


def test_update_does_not_wait_for_groups_of_a_later_update():
    pool = FakePool(slow={drawn(1)[0]})
    overlapping = sampler(pool, max_staleness=1)
    first = overlapping.sample(1)
    assert drawn(1)[0] not in tasks_of(first.kept)
    pool.version += 1
    assert drawn(1)[0] in tasks_of(overlapping.sample(2).kept), "the last update that it may enter waits for it"


def test_tasks_of_an_interrupted_and_resumed_run_are_trained_once():
    pool = FakePool()
    overlapping = sampler(pool, max_staleness=1)
    trained = []
    for iteration in range(1, 4):
        trained += tasks_of(overlapping.sample(iteration).kept)
        update(pool)
    state = overlapping.get_state()
    seeds = {request.task_id: request.seed for request in pool.started}
    overlapping.sample(4)  # lost with the interruption

    for resumed_pool, resumed in [(pool, overlapping), (fresh := FakePool(seed=9), sampler(fresh, 1))]:
        resumed_pool.started = []
        resumed.set_state(state)
        again = list(trained)
        for iteration in range(4, 8):
            again += tasks_of(resumed.sample(iteration).kept)
            update(resumed_pool)
        waiting = [request["task_id"] for request in resumed.get_state()["returned"]]
        assert sorted(again + waiting) == sorted(drawn(T * 8))
        assert len(set(again)) == 7 * T
        replayed = resumed_pool.started[:T]
        assert {request.task_id for request in replayed} == {each["task_id"] for each in state["returned"]}
        assert all(request.seed == seeds[request.task_id] for request in replayed)


def test_small_effective_sample_size_makes_next_iteration_on_policy():
    pool = FakePool()
    limit = {"min_effective_sample_size": 0.4}
    overlapping = sampler(pool, 1, limit)
    first = tasks_of(overlapping.sample(1).kept)
    overlapping.note_effective_sample_size(0.39)
    update(pool)
    resumed = sampler(FakePool(), 1, limit)
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
    update(pool)
    third = overlapping.sample(3).metrics()
    assert (third["groups/num_on_policy_iterations"], third["groups/num_in_flight"]) == (0, T)
    strict = sampler(FakePool(), 0, limit)
    strict.note_effective_sample_size(0.1)
    assert strict.sample(1).metrics()["groups/num_on_policy_iterations"] == 0


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

    pool = FakePool(play=play, slow=set(drawn(9)[T:]))
    sampling = sampler(pool, max_staleness)
    batch = sampling.sample(1)
    assert at_bound in tasks_of(batch.kept)
    assert too_old not in tasks_of(batch.kept)
    assert (batch.num_stale, batch.stale_rows) == (1, 12)
    oldest.clear()
    pool.version += 1
    trained = tasks_of([*batch.kept, *sampling.sample(2).kept])
    assert len(trained) == len({*trained}) == 2 * T - 1
    assert starts_of(pool)[too_old] == 2


def test_groups_that_end_between_iterations_are_recorded_in_the_next():
    pool = FakePool()
    overlapping = sampler(pool, max_staleness=1)
    overlapping._config.recording(trajectories_folder="trajectories")
    first = overlapping.sample(1)
    overlapping.finish()
    assert {iteration for iteration, _ in pool.recorded} == {1}
    second = overlapping.sample(2)
    recorded = [sample.request.index for _, sample in pool.recorded]
    assert len(recorded) == len({*recorded})
    for iteration, batch in enumerate((first, second), 1):
        rows = sum(sample.num_rows for each, sample in pool.recorded if each == iteration)
        assert rows == batch.metrics()["rows/sampled"]


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_group_with_too_few_completed_rollouts_is_redrawn_then_dropped(max_staleness):
    """No easier task takes its place. Two survivors are enough."""
    few, none, two = drawn(3)

    def play(request, times):
        if request.task_id == two:
            return FEW | {"num_survivors": 2}
        return FEW if request.task_id == none or (request.task_id, times) == (few, 1) else {}

    pool = FakePool(play=play)
    overlapping = sampler(pool, max_staleness, {"max_group_redraws": 2})
    kept, dropped, sampled, parts, redrawn = [], [], 0, 0, 0
    for iteration in range(1, 4):
        batch = overlapping.sample(iteration)
        kept += tasks_of(batch.kept)
        dropped += tasks_of(batch.dropped)
        rows = {name: count for name, count in batch.metrics().items() if name.startswith("rows/")}
        redrawn += rows["rows/redrawn"]
        sampled += rows.pop("rows/sampled")
        in_flight = rows.pop("rows/in_flight")
        parts += sum(rows.values())
        update(pool)
    assert sampled == parts + in_flight == pool.rows_handed_out
    assert redrawn > 0
    assert few in kept
    assert dropped == [none]
    assert len({request.seed for request in pool.started if request.task_id == none}) == 3
    assert two in kept
    assert starts_of(pool)[two] == 1


def test_lost_group_keeps_its_seed_and_failed_group_gets_another(caplog):
    """The second is lost four times, the third fails and is lost after that, the last is lost each time."""
    tasks = drawn(4)
    lost = {(tasks[1], times) for times in range(1, 5)} | {(tasks[2], 2)}
    pool = FakePool(
        runners=tuple(range(100)),
        play=lambda request, times: FEW if (request.task_id, times) == (tasks[2], 1) else {},
        dies=lambda request, times: request.task_id == tasks[3] or (request.task_id, times) in lost,
    )
    kept = sampler(pool, rollouts={"max_group_redraws": 1}).sample(1).kept
    assert sorted(tasks_of(kept)) == sorted(tasks[:3])
    seeds = [[request.seed for request in pool.started if request.task_id == task] for task in tasks]
    assert [len(each) for each in seeds] == [1, 5, 3, 1 + MAX_LOSSES]
    assert [len({*each}) for each in seeds] == [1, 1, 2, 1]
    assert seeds[2][1] == seeds[2][2]
    assert "its env runners were lost 6 times" in caplog.text


def gone(*arguments: Any) -> None:
    raise InfrastructureError("gone")


@pytest.mark.parametrize("call", ["submit", "wait", "repair"])
@pytest.mark.parametrize("evaluating", [False, True])
def test_every_group_is_redrawn_after_an_infrastructure_error(call, evaluating, monkeypatch):
    """An evaluation waits for the groups in flight as well."""
    pool, dying = FakePool(seed=3), []
    pool.dies = lambda request, times: bool(dying)
    sampling = sampler(pool, max_staleness=1)
    first = sampling.sample(1)
    waiting = {(each["task_id"], each["seed"]) for each in sampling.get_state()["returned"]}
    pool.started = []
    with monkeypatch.context() as broken:
        broken.setattr(pool, call, gone)
        dying.append(True)  # Groups that are lost begin again after a repair.
        with pytest.raises(InfrastructureError, match="gone"):
            sampling.finish() if evaluating else sampling.sample(2)
    dying.clear()
    assert pool.playing == []
    pool.version += 1
    batch = sampling.sample(2)
    assert waiting <= {(request.task_id, request.seed) for request in pool.started}
    assert len(batch.kept) == T
    left = [each["task_id"] for each in sampling.get_state()["returned"]]
    assert sorted([*tasks_of(first.kept), *tasks_of(batch.kept), *left]) == sorted(drawn(3 * T))
    counts = [each.metrics() for each in (first, batch)]
    assert sum(each["rows/sampled"] for each in counts) == pool.rows_handed_out


def test_error_while_resampling_redraws_the_kept_groups(monkeypatch):
    """Their rows are counted as redrawn."""
    pool = FakePool(play=lambda request, times: {"zero_variance": request.task_id == drawn(1)[0]})
    sampling = sampler(pool, drop_zero_variance_groups=True, max_refills=1)
    submit, started = pool.submit, []

    def submit_once(requests, settings, playing):
        started.append(requests)
        return submit(requests, settings, playing) if len(started) != 2 else gone()

    monkeypatch.setattr(pool, "submit", submit_once)
    with pytest.raises(InfrastructureError, match="gone"):
        sampling.sample(1)
    rows = pool.rows_handed_out
    assert rows > 0
    batch = sampling.sample(1)
    assert sorted(tasks_of([*batch.kept, *batch.dropped])) == sorted(drawn(T + 1))
    assert batch.metrics()["rows/redrawn"] == rows
    assert batch.metrics()["rows/sampled"] == pool.rows_handed_out


@pytest.mark.parametrize("loss", ["dies", "hangs"])
def test_finished_groups_of_a_lost_runner_are_played_again(loss):
    pool = FakePool(runners=(1,), stuck={drawn(2 * T)[-1]})
    pool.repair = lambda again: pool.stuck.clear()
    if loss == "dies":
        pool.dies = lambda request, times: len(pool.playing) == times == 1
    sampling = sampler(pool, 1, {"max_group_redraws": 0})
    trained = tasks_of(sampling.sample(1).kept)
    sampling.finish()
    started = starts_of(pool)
    assert all(started[task] == 1 + (task not in trained) for task in drawn(2 * T))
    for iteration in (2, 3):
        pool.version += 1
        trained += tasks_of(sampling.sample(iteration).kept)
    assert len({*trained}) == len(trained) == 3 * T
    assert len({(request.task_id, request.seed) for request in pool.started}) == len(starts_of(pool))


@pytest.mark.parametrize("resumed", [False, True])
def test_rows_of_groups_that_are_given_up_are_counted(resumed):
    """By weights that a user sets, or by the end of the driver."""
    pool = FakePool(seed=3)  # some have ended
    sampling = sampler(pool, max_staleness=1)
    first = sampling.sample(1)
    if resumed:
        sampling.cancel()
        state, sampling = sampling.get_state(), sampler(pool, max_staleness=1)
        sampling.set_state(state)
    else:
        sampling.finish()
        sampling.restart()
    batches = [first, sampling.sample(2)]
    rows = [{name: count for name, count in each.metrics().items() if name.startswith("rows/")} for each in batches]
    sampled, in_flight = sum(each.pop("rows/sampled") for each in rows), [each.pop("rows/in_flight") for each in rows]
    assert sampled == pool.rows_handed_out == sum(sum(each.values()) for each in rows) + in_flight[-1]
    assert sum(each.counts[0].turns for each in batches) == sampled
    assert rows[1]["rows/redrawn"] >= in_flight[0] > 0


def test_groups_that_never_end_stop_the_run():
    pool = FakePool(stuck=set(drawn(T * 2)))
    sampling = sampler(pool, max_staleness=1)
    with pytest.raises(InfrastructureError):
        sampling.sample(1)
    assert len(pool.started) == (1 + MAX_LOSSES) * 2 * T
    # The cause may be gone when the caller tries again.
    pool.stuck = set()
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

    sampling = sampler(pool := FakePool(play=play))
    with pytest.raises(InfrastructureError) as caught:
        sampling.sample(1)
    assert type(caught.value) is expected
    (entry,) = sampling._config.environment_entries()
    with pytest.raises(InfrastructureError, match="the evaluation set's 2 episodes could not be") as caught:
        EvaluationPlayer(sampling._config, pool).play(EvaluationSet("trial/ALFWorld-v0", "train", ("a", "b")), entry)
    assert type(caught.value) is expected


def vars_of(sample: GroupSample) -> dict[str, Any]:
    return {name: getattr(sample, name) for name in GroupSample.__dataclass_fields__}


def test_task_with_oversized_first_prompt_is_dropped_and_counted(
    caplog,
):
    def play(request, times):
        return {**FEW, "num_survivors": 0, "errors": [], "too_long": f"task {request.task_id!r}, turn 1: 99"}

    first = drawn(1)[0]
    pool = FakePool(play=lambda request, times: play(request, times) if request.task_id == first else {})
    batch = sampler(pool).sample(1)
    assert (len(batch.kept), tasks_of(batch.dropped), len(pool.started)) == (3, [first], T)
    assert batch.metrics()["groups/num_too_long"] == 1
    assert batch.dropped[0].too_long in caplog.text
    with pytest.raises(PromptTooLongError, match=r"all 4 tasks of iteration 1 do not fit \('task-.*turn 1: 99"):
        sampler(FakePool(play=play)).sample(1)
    mixed = FakePool(play=lambda request, times: play(request, times) if request.task_id == first else FEW)
    with pytest.raises(InfrastructureError, match="EngineError: gone"):
        sampler(mixed).sample(1)


def test_groups_without_variance_are_dropped_and_resampled():
    """Of four tasks two are dead, of the two drawn in their place one, of the last none."""
    dead = {*drawn(2), drawn(5)[4]}
    pool = FakePool(play=lambda request, times: {"zero_variance": request.task_id in dead, "num_rows": 7})
    assert len(sampler(pool).sample(1).kept) == T
    for refills, kept, dropped, refilled in ((0, 2, 2, 0), (5, 4, 3, 3)):
        batch = sampler(pool, drop_zero_variance_groups=True, max_refills=refills).sample(1)
        assert (len(batch.kept), len(batch.dropped), batch.num_refilled) == (kept, dropped, refilled)
        metrics = batch.metrics()
        rows = tuple(metrics[f"rows/{name}"] for name in ("sampled", "given_to_learners", "left_out"))
        assert rows == (7 * (kept + dropped), 7 * kept, 7 * dropped)
        assert len(set(tasks_of([*batch.kept, *batch.dropped]))) == kept + dropped
    pool.play = lambda request, times: {"zero_variance": True}
    batch = sampler(pool, drop_zero_variance_groups=True, max_refills=2).sample(1)
    assert batch.kept == []
    assert "in 12 groups every rollout earned the same reward" in batch.reason
    assert batch.metrics()["groups/num_empty_iterations"] == 1


def test_groups_with_unequal_starts_are_counted_and_warned_of_once(caplog):
    pool = FakePool(play=lambda request, times: {"starts_differ": request.task_id != drawn(1)[0]})
    draw = sampler(pool)
    assert draw.sample(1).metrics()["groups/unequal_start_fraction"] == (T - 1) / T
    draw.sample(2)
    assert ["begin with different observations" in record.message for record in caplog.records].count(True) == 1


def test_zero_variance_fraction_ignores_groups_with_one_rollout():
    def sample(survivors, zero_variance):
        return GroupSample(
            GroupRequest(0, "task", 4, 0), None, [], [], survivors, 10, zero_variance, RolloutCounts(turns=10)
        )

    lost = [sample(survivors, True) for survivors in (0, 1)]
    batch = SampledBatch([sample(4, False), sample(4, True)], lost)
    assert batch.metrics()["groups/zero_variance_fraction"] == 0.5
    assert "groups/zero_variance_fraction" not in SampledBatch([], lost).metrics()
