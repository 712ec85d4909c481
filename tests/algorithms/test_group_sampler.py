"""The groups of an iteration: none is too old, lost or trained twice, failed groups are redrawn, and all rows are counted."""

import math
import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import cycle

import pytest

from trial_ray import GRPOConfig
from trial_ray.algorithms.sampled_batch import SampledBatch
from trial_ray.algorithms.sampling import MAX_LOSSES, GroupSampler
from trial_ray.algorithms.tasks import SuccessRateSampler, TaskSampler
from trial_ray.errors import EnvironmentFaultError, InfrastructureError, PromptTooLongError
from trial_ray.evaluation.evaluation_sets import EvaluationSet
from trial_ray.evaluation.player import play_evaluation_set
from trial_ray.rollout.groups import GroupRequest, GroupSample, RolloutCounts
from trial_ray.trajectory import EpisodeResult, Trajectory, TrajectoryGroup, Turn

T = 4
FEW = {"num_completed": 1, "errors": ["EngineError: gone"]}


@dataclass(eq=False)
class Playing:
    request: GroupRequest
    runner: int
    turns_left: float
    versions: list = field(default_factory=list)


class FakePool:
    """Env runners whose groups take a turn or none in each call, by chance; the real ones play in tests/e2e.

    Attributes:
        play: what of a group's sample is not as usual, by its task.
        dies: whether the runner of a group dies, by its task.
        turns: number of turns of a task's groups; of other tasks, it is a small one by chance.
        started: requests of all groups, in the order of their starts.
        recorded: samples that were recorded, each with its iteration.
    """

    def __init__(self, play=lambda task: {}, dies=lambda task: False, turns=(), runners=(1, 2), seed=0):
        self.play, self.dies, self.turns, self.runners = play, dies, dict(turns), cycle(runners)
        self.random, self.version, self.rows_handed_out = random.Random(seed), 1, 0
        self.playing, self.started, self.recorded = [], [], []

    def starts(self):
        """Return how often each task has started."""
        return Counter(request.task_id for request in self.started)

    def submit(self, requests, settings, playing=()):
        for request in requests:
            assert request.index not in [each.request.index for each in self.playing]
            turns = self.turns.get(request.task_id) or self.random.randint(1, 6)
            self.playing.append(Playing(request, next(self.runners), turns))
            self.started.append(request)
        return self.playing[len(self.playing) - len(requests) :]

    def wait(self, playing, timeout_s):
        assert {*playing} == {*self.playing}
        dead = {each.runner for each in playing if self.dies(each.request.task_id)}
        self.playing = [each for each in self.playing if each.runner not in dead]
        for _ in range(100):  # none ends within the time where one never does
            self.advance()
            if not timeout_s or dead or any(each.turns_left <= 0 for each in self.playing):
                break
        samples = {each: self._sample(each) for each in self.playing if each.turns_left <= 0}
        self.playing = [each for each in self.playing if each not in samples]
        self.rows_handed_out += sum(sample.num_rows for sample in samples.values())
        return samples, dead

    def advance(self):
        for each in self.playing:
            if self.random.random() < 0.7:
                each.versions.append(self.version)
                each.turns_left -= 1

    def _sample(self, each):
        rows, versions, task = 3 * len(each.versions), (min(each.versions), max(each.versions)), each.request.task_id
        usual = GroupSample(each.request, None, [], [], 4, rows, False, RolloutCounts(turns=rows), versions)
        return replace(usual, **self.play(task))

    def stream_groups(self, requests, settings):
        yield from [self._sample(Playing(request, 1, 0, [1])) for request in requests]

    def cancel(self, playing):
        assert {*playing} >= {*self.playing}
        self.playing = []

    def replace_late(self, playing):
        self.cancel(playing)
        return {each.runner for each in playing}

    def record(self, iteration, samples):
        self.recorded += [(iteration, sample) for sample in samples]

    def repair(self, again):
        """Nothing to repair."""

    def pop_losses(self):
        return []


def sampler(pool, max_staleness=0, tasks=None, **settings):
    config = GRPOConfig().environment("trial/ALFWorld-v0").training(group_size=4, tasks_per_iteration=T)
    vars(config).update(settings, max_staleness=max_staleness, trajectories_folder="trajectories")
    return GroupSampler(config, tasks or new_tasks(), pool, lambda: pool.version)


def new_tasks():
    return TaskSampler([[*map(str, range(1000))]], seed=0)


def tasks_of(samples):
    return [sample.request.task_id for sample in samples]


def drawn(count):
    return [request.task_id for request in new_tasks().draw(count, 4)]


def disturb(sampling, pool, iteration, chance):
    """Let something happen between two iterations, or in the one that begins; return its batch if it ends."""
    happens = chance.choice(["new weights", "resume", "submit", "wait", "repair"])
    if happens == "new weights":
        sampling.finish()
        sampling.restart()
    elif happens == "resume":
        sampling.cancel()
        state = sampling.get_state()
        sampling.__init__(sampling._config, new_tasks(), pool, sampling._version)
        sampling.set_state(state)
    else:
        working = getattr(pool, happens)

        def failing(*arguments):
            if chance.random() < 0.5:
                raise InfrastructureError("gone")
            return working(*arguments)

        setattr(pool, happens, failing)
        try:
            with suppress(InfrastructureError):
                return sampling.sample(iteration) if chance.random() < 0.5 else sampling.finish()
            assert pool.playing == []
        finally:
            setattr(pool, happens, working)
    return None


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_no_group_gets_too_old_and_every_task_is_trained_once(max_staleness, seed):
    """Groups are slow, fail, are lost, and, except with the first seed, are given up between iterations."""
    chance = random.Random(seed)
    failed = set()

    def play(task):
        if chance.random() < 0.1:
            failed.add(task)
            return FEW
        return {"zero_variance": chance.random() < 0.1}

    turns = dict.fromkeys(drawn(200)[::7], 40)
    pool = FakePool(play, lambda task: chance.random() < 0.003, turns, seed=seed)
    own = {} if max_staleness else {"drop_zero_variance_groups": True, "max_refills": 2}
    sampling = sampler(pool, max_staleness, max_group_redraws=1, **own)
    ended, in_flight, ages, mixed = [], 0, set(), 0
    for iteration in range(1, 25):
        batch = (seed and disturb(sampling, pool, iteration, chance)) or sampling.sample(iteration)
        ages |= {pool.version - sample.weight_versions[0] for sample in batch.kept}
        ended += tasks_of([*batch.kept, *batch.dropped])
        counts = batch.metrics()
        assert (counts["groups/num_stale"], counts["groups/num_in_flight"]) == (0, T * max_staleness)
        mixed += counts["groups/num_of_several_versions"]
        rows = {name: count for name, count in counts.items() if name.startswith("rows/")}
        sampled = rows.pop("rows/sampled")
        assert sampled == sum(rows.values()) - in_flight == sum(each.turns for each in batch.counts.values())
        assert sampled == sum(sample.num_rows for each, sample in pool.recorded if each == iteration)
        in_flight = rows["rows/in_flight"]
        for _ in range(chance.randint(0, 4)):
            pool.advance()  # The env runners play on during the update.
        pool.version += 1
    assert max(ages) == max_staleness if seed == 0 else max(ages) <= max_staleness
    assert (mixed > 0) == (max_staleness > 0)
    assert sum(sample.num_rows for _, sample in pool.recorded) == pool.rows_handed_out
    waiting = [request["task_id"] for request in sampling.get_state()["returned"]]
    assert sorted(ended + waiting) == sorted(drawn(len(ended + waiting)))
    seeds = {request.task_id: request.seed for request in new_tasks().draw(len(pool.started), 4)}
    assert all(seeds[request.task_id] == request.seed for request in pool.started if request.task_id not in failed)


def test_success_rates_are_those_of_the_groups_that_entered():
    pool = FakePool(lambda task: {"episodes": [EpisodeResult(task, "", True, 1.0, 1, "terminated")]})
    tasks = SuccessRateSampler([drawn(20)], seed=0)
    batch = sampler(pool, tasks=tasks).sample(1)
    assert batch.metrics()["tasks/seen_fraction"] == T / 20
    assert tasks.get_state()["success_counts"] == [{task: [1.0, 0.0] for task in tasks_of(batch.kept)}]


def test_update_does_not_wait_for_groups_of_a_later_update():
    pool = FakePool(turns=dict.fromkeys(drawn(1), 40))
    overlapping = sampler(pool, max_staleness=1)
    assert drawn(1)[0] not in tasks_of(overlapping.sample(1).kept)
    pool.version += 1
    assert drawn(1)[0] in tasks_of(overlapping.sample(2).kept), "the last update that it may enter waits for it"


def test_small_effective_sample_size_makes_next_iteration_on_policy():
    pool, limit = FakePool(), {"min_effective_sample_size": 0.4}
    overlapping, resumed = sampler(pool, 1, **limit), sampler(FakePool(), 1, **limit)
    first = tasks_of(overlapping.sample(1).kept)
    for size, *expected in ((0.39, 1, T, 0), (0.4, 0, 0, T)):
        overlapping.note_effective_sample_size(size)
        pool.version += 1
        resumed.set_state(overlapping.get_state())
        batch = overlapping.sample(pool.version)
        if batch.on_policy:
            assert sorted(first + tasks_of(batch.kept)) == sorted(drawn(2 * T))
        names = ("num_on_policy_iterations", "num_stale", "num_in_flight")
        assert [batch.metrics()[f"groups/{name}"] for name in names] == expected
        assert resumed.sample(2).on_policy == batch.on_policy
    strict = sampler(FakePool(), **limit)
    strict.note_effective_sample_size(0.1)
    assert not strict.sample(1).on_policy


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_the_oldest_turn_decides_whether_a_group_is_too_old(max_staleness):
    """Of two groups with turns of the current weights, one has a turn of the oldest that are allowed, one of older ones."""
    at_bound, too_old = drawn(2)
    oldest = {at_bound: 1 - max_staleness, too_old: -max_staleness}
    pool = FakePool(lambda task: {"weight_versions": (oldest.get(task, 1), 1), "num_rows": 12})
    pool.turns = dict.fromkeys(drawn(9)[T:], 40)
    sampling = sampler(pool, max_staleness)
    batch = sampling.sample(1)
    assert at_bound in tasks_of(batch.kept)
    assert (len(batch.kept), batch.num_stale, batch.stale_rows) == (T - 1, 1, 12)
    oldest.clear()
    sampling.sample(2)
    assert pool.starts()[too_old] == 2
    turns = [Turn(weight_version=version) for version in (2, 1, 3)]
    group = TrajectoryGroup(at_bound, [Trajectory(at_bound, "", 0, turns)])
    assert GroupSample.from_group(pool.started[0], group, GRPOConfig()).weight_versions == (1, 3)


def test_lost_group_keeps_its_seed_and_failed_group_gets_another(caplog):
    """The first fails each time, the second is lost four times, the third fails and is lost after that, the last is always lost."""
    tasks = drawn(4)
    # The numbers of the starts that fail and that are lost, by task.
    failing = {tasks[0]: (1, 2), tasks[2]: (1,)}
    lost = {tasks[1]: range(1, 5), tasks[2]: (2,), tasks[3]: range(1, 99)}
    pool = FakePool(
        lambda task: FEW if pool.starts()[task] in failing.get(task, ()) else {},
        lambda task: pool.starts()[task] in lost.get(task, ()),
        runners=range(100),
    )
    batch = sampler(pool, max_group_redraws=1).sample(1)
    assert sorted(tasks_of(batch.kept)) == sorted(tasks[1:3])
    assert tasks_of(batch.dropped) == tasks[:1]
    seeds = [[request.seed for request in pool.started if request.task_id == task] for task in tasks]
    assert [len(each) for each in seeds] == [2, 5, 3, 1 + MAX_LOSSES]
    assert [len({*each}) for each in seeds] == [2, 1, 2, 1]
    assert seeds[2][1] == seeds[2][2]
    assert "lost 6 times" in caplog.text


@pytest.mark.parametrize("loss", ["dies", "hangs"])
def test_finished_groups_of_a_lost_runner_are_played_again(loss):
    pool = FakePool(runners=(1,), turns={drawn(2 * T)[-1]: math.inf})
    pool.repair = lambda again: pool.turns.clear()
    if loss == "dies":
        pool.dies = lambda task: len(pool.playing) == pool.starts()[task] == 1
    sampling = sampler(pool, 1, max_group_redraws=0)
    trained = tasks_of(sampling.sample(1).kept)
    sampling.finish()
    assert pool.starts() == {task: 1 + (task not in trained) for task in drawn(2 * T)}
    assert len({(request.task_id, request.seed) for request in pool.started}) == 2 * T
    pool.version += 1
    assert not {*trained} & {*tasks_of(sampling.sample(2).kept)}


def test_groups_that_never_end_stop_the_run():
    pool = FakePool(turns=dict.fromkeys(drawn(T * 2), math.inf))
    sampling = sampler(pool, max_staleness=1)
    with pytest.raises(InfrastructureError):
        sampling.sample(1)
    assert len(pool.started) == (1 + MAX_LOSSES) * 2 * T
    pool.turns = {}  # The cause may be gone when the caller tries again.
    assert len(sampling.sample(1).kept) == T


@pytest.mark.parametrize(("faults", "expected"), [(2, EnvironmentFaultError), (1, InfrastructureError)])
def test_only_a_field_says_whose_failures_ended_an_iteration(faults, expected):
    """A restart of the run cures engines, not environments; an error's text may read in any way."""
    failed = {"num_completed": 0, "errors": ["EnvironmentFaultError: quoted"] * 2, "num_environment_faults": faults}
    failed["episodes"] = [EpisodeResult("a", "", False, 0.0, 0, "failed")]
    sampling = sampler(pool := FakePool(lambda task: failed), max_group_redraws=0)
    (entry,) = sampling._config.environment_entries()
    evaluated = EvaluationSet("trial/ALFWorld-v0", "train", ("a",))
    for fail in (lambda: sampling.sample(1), lambda: play_evaluation_set(sampling._config, pool, evaluated, entry)):
        with pytest.raises(InfrastructureError) as caught:
            fail()
        assert type(caught.value) is expected


def test_task_with_oversized_first_prompt_is_dropped_and_counted(caplog):
    def pool_of(*long, **others):
        told = {"num_completed": 0, "too_long": "99 tokens"}
        return FakePool(lambda task: told if task in long else others)

    batch = sampler(pool := pool_of(*drawn(1))).sample(1)
    assert (len(batch.kept), tasks_of(batch.dropped), len(pool.started)) == (3, drawn(1), T)
    assert batch.metrics()["groups/num_too_long"] == 1
    assert "99 tokens" in caplog.text
    with pytest.raises(PromptTooLongError, match="99 tokens"):
        sampler(pool_of(*drawn(T))).sample(1)
    with pytest.raises(InfrastructureError, match="EngineError: gone"):
        sampler(pool_of(*drawn(1), **FEW)).sample(1)


def test_groups_without_variance_are_dropped_and_resampled():
    """Of four tasks two are dead, of the two drawn in their place one, of the last none."""
    dead = {*drawn(2), drawn(5)[4]}
    pool = FakePool(lambda task: {"zero_variance": task in dead})
    assert len(sampler(pool).sample(1).kept) == T
    for refills, kept, dropped in ((0, 2, 2), (1, 3, 3), (5, 4, 3)):
        batch = sampler(pool, drop_zero_variance_groups=True, max_refills=refills).sample(1)
        assert (len(batch.kept), len(batch.dropped)) == (kept, dropped)
        assert batch.num_refilled == kept + dropped - T
        for name, samples in {"given_to_learners": batch.kept, "left_out": batch.dropped}.items():
            assert batch.metrics()[f"rows/{name}"] == sum(sample.num_rows for sample in samples)
    pool.play = lambda task: {"zero_variance": True}
    batch = sampler(pool, drop_zero_variance_groups=True).sample(1)
    assert "in 4 groups every rollout earned the same reward, and in 0" in batch.reason
    assert (batch.kept, batch.metrics()["groups/num_empty_iterations"]) == ([], 1)


def test_fractions_leave_out_groups_with_one_rollout(caplog):
    """Of four groups, one has one rollout, and one has two and no variance; all except the latter have unequal starts."""
    one, two, *_ = drawn(T)
    own = {
        one: {**FEW, "zero_variance": True},
        two: {"num_completed": 2, "zero_variance": True, "starts_differ": False},
    }
    draw = sampler(FakePool(lambda task: {"starts_differ": True, **own.get(task, {})}))
    batch = draw.sample(1)
    names = ("groups/zero_variance_fraction", "groups/unequal_start_fraction")
    assert [batch.metrics()[name] for name in names] == [1 / 3, 2 / 3]
    assert not {*names} & SampledBatch(dropped=batch.dropped).metrics().keys()
    draw.sample(2)
    assert caplog.text.count("begin with different observations") == 1
