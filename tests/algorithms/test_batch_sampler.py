"""What an iteration trains on: lost groups are drawn again, groups without variance are left out and refilled, all counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from trial_ray.algorithms import GRPOConfig
from trial_ray.algorithms.sampling import MAX_LOSSES, GroupSampler, SampledBatch
from trial_ray.algorithms.task_sampler import TaskSampler
from trial_ray.errors import EnvironmentFaultError, InfrastructureError, PromptTooLongError
from trial_ray.evaluation.panels import Panel
from trial_ray.evaluation.player import PanelPlayer
from trial_ray.rollout.groups import GroupRequest, GroupSample, RolloutCounts
from trial_ray.rollout.trajectory import Trajectory, TrajectoryGroup


class PlayedWorkers:
    """Answers every request by a rule, each by a runner of its own; the real ones play in tests/e2e."""

    def __init__(
        self, play: Callable[[GroupRequest, int], GroupSample], lost: Callable[[int, int], bool] = lambda *_: False
    ) -> None:
        self._play = play
        self._lost = lost
        self._begun: list[GroupRequest] = []
        self.calls = 0

    def begin_groups(self, requests, settings):
        self.calls += 1
        self._begun += requests
        return {request.index: request.index for request in requests}

    def take_groups(self, runner_ids, iteration, timeout_s, together):
        assert together
        assert runner_ids == {request.index for request in self._begun}, "the others have handed over theirs"
        begun, self._begun = self._begun, []
        lost = [request.index for request in begun if self._lost(request.index, self.calls)]
        return [self._play(request, self.calls) for request in begun if request.index not in lost], lost

    def stream_groups(self, requests, settings):
        return [self._play(request, 1) for request in requests]

    def repair(self, again: int) -> None:
        """Nothing to repair."""

    def take_losses(self) -> list[str]:
        return []


def sample_of(request: GroupRequest, survivors: int = 4, zero_variance: bool = False, rows: int = 10) -> GroupSample:
    errors = [] if survivors == 4 else ["EngineError: gone"]
    return GroupSample(request, None, [], errors, survivors, rows, zero_variance, RolloutCounts(turns=rows))


def sampler(play, **training) -> tuple[GroupSampler, PlayedWorkers]:
    config = GRPOConfig().environment("trial/ALFWorld-v0").training(group_size=4, tasks_per_iteration=4, **training)
    workers = PlayedWorkers(play)
    tasks = TaskSampler([[f"task-{number}" for number in range(100)]], seed=0)
    return GroupSampler(config, tasks, workers, lambda: 0), workers


def counted(batch: SampledBatch, prefix: str) -> dict[str, float]:
    """The counts that are not 0."""
    found = {name.removeprefix(prefix): count for name, count in batch.metrics().items() if name.startswith(prefix)}
    return {name: count for name, count in found.items() if count and not name.endswith("fraction")}


def adds_up(batch: SampledBatch) -> bool:
    rows = {"left_out": 0, "redrawn": 0, **counted(batch, "rows/")}
    played = sum((counts.turns for counts in batch.counts.values()), 0)
    return rows["sampled"] == rows["given_to_learners"] + rows["left_out"] + rows["redrawn"] == played


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

    def play(request, call):
        error = "EnvironmentFaultError: quoted by an engine"
        failed = [Trajectory(request.task_id, "", 0, ended="failed", error=error, failed_by=each) for each in failed_by]
        return GroupSample.from_group(request, TrajectoryGroup(request.task_id, failed), None, "success", 0.0)

    sampling, workers = sampler(play)
    with pytest.raises(InfrastructureError, match="No group of rollouts survived iteration 1") as caught:
        sampling.sample(1)
    assert type(caught.value) is expected
    (entry,) = sampling._config.environment_entries()
    with pytest.raises(
        InfrastructureError, match=r"2 of the evaluation set's 2 episodes could not be .*: EnvironmentF"
    ) as caught:
        PanelPlayer(sampling._config, workers).play(Panel("trial/ALFWorld-v0", "train", ("a", "b")), entry)
    assert type(caught.value) is expected


def too_long(request: GroupRequest) -> GroupSample:
    return replace(
        sample_of(request, survivors=0, rows=0), errors=[], too_long=f"Home, task {request.task_id!r}, turn 1: 99"
    )


def test_a_task_whose_first_prompt_does_not_fit_is_named_counted_and_not_played_again(caplog):
    play = lambda request, call: too_long(request) if request.index == 1 else sample_of(request)  # noqa: E731
    sampling, workers = sampler(play)
    batch = sampling.sample(1)
    assert (len(batch.kept), len(batch.left_out), workers.calls) == (3, 1, 1)
    assert batch.metrics()["groups/num_too_long"] == 1
    assert batch.left_out[0].too_long in caplog.text


def test_where_no_first_prompt_fits_the_tasks_and_the_limit_are_told():
    sampling, workers = sampler(lambda request, call: too_long(request))
    with pytest.raises(
        PromptTooLongError, match=r"first prompts of all 4 tasks of iteration 1 do not fit \('task-.*turn 1: 99"
    ):
        sampling.sample(1)
    assert workers.calls == 1
    mixed = lambda request, call: sample_of(request, survivors=0) if request.index else too_long(request)  # noqa: E731
    with pytest.raises(InfrastructureError, match="EngineError: gone"):
        sampler(mixed)[0].sample(1)


def test_groups_without_variance_are_kept_unless_they_are_to_be_dropped():
    dead_first = lambda request, call: sample_of(request, zero_variance=request.index == 0)  # noqa: E731
    kept = sampler(dead_first)[0].sample(1)
    assert (len(kept.kept), len(kept.left_out)) == (4, 0)
    dropped = sampler(dead_first, drop_zero_variance_groups=True)[0].sample(1)
    assert (len(dropped.kept), len(dropped.left_out), dropped.num_refilled) == (3, 1, 0)
    assert adds_up(dropped)


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
    assert counted(batch, "groups/") == {"num_trained": 4, "num_dropped": 3, "num_refilled": 3}
    assert adds_up(batch)
    assert counted(batch, "rows/") == {"sampled": 49, "given_to_learners": 28, "left_out": 21}


def test_refills_end_and_an_iteration_that_trains_nothing_says_why():
    filler, workers = sampler(
        lambda request, call: sample_of(request, zero_variance=True), drop_zero_variance_groups=True, max_refills=2
    )
    batch = filler.sample(1)
    assert (workers.calls, batch.kept) == (3, [])
    assert "in 12 groups every rollout earned the same reward" in batch.reason
    assert batch.metrics()["groups/num_empty_iterations"] == 1


def test_a_group_that_was_lost_is_played_again_with_its_seed_and_a_failed_one_with_another(caplog):
    """Group 1 is lost four times, group 2 fails and is lost after that, group 3 is lost each time."""
    seeds: dict[int, list[int]] = {}

    class SeenWorkers(PlayedWorkers):
        def begin_groups(self, requests, settings):
            for request in requests:
                seeds.setdefault(request.index, []).append(request.seed)
            return super().begin_groups(requests, settings)

    def lost(index, call):
        tries = len(seeds[index])
        return index == 3 or (index == 1 and tries <= 4) or (index == 2 and tries == 2)

    sampling, _ = sampler(None)
    sampling._config.env_runners(max_group_redraws=1)
    few = lambda request, call: 1 if request.index == 2 and len(seeds[2]) == 1 else 4  # noqa: E731
    sampling._workers = SeenWorkers(lambda request, call: sample_of(request, survivors=few(request, call)), lost)
    assert [sample.request.index for sample in sampling.sample(1).kept] == [0, 1, 2]
    assert [len(seeds[index]) for index in range(4)] == [1, 5, 3, 1 + MAX_LOSSES]
    assert [len({*seeds[index]}) for index in range(4)] == [1, 1, 2, 1]
    assert seeds[2][1] == seeds[2][2]
    assert "its env runners were lost 6 times" in caplog.text


def test_a_group_with_too_few_survivors_is_drawn_again_and_its_rows_are_counted():
    played = []

    def play(request, call):
        played.append((request.task_id, request.seed))
        return sample_of(request, survivors=1 if request.index == 2 and call == 1 else 4, rows=3)

    batch = sampler(play)[0].sample(1)
    assert len(batch.kept) == 4
    (task, seed), (again, other_seed) = played[2], played[4]
    assert again == task, "no easier task takes its place"
    assert other_seed != seed
    assert counted(batch, "rows/") == {"sampled": 15, "given_to_learners": 12, "redrawn": 3}


def test_the_share_of_groups_without_variance_is_of_those_whose_rewards_could_differ():
    request = GroupRequest(0, "task", 4, 0)
    lost = [sample_of(request, survivors=survivors, zero_variance=True) for survivors in (0, 1)]
    batch = SampledBatch([sample_of(request), sample_of(request, zero_variance=True)], lost)
    assert batch.metrics()["groups/zero_variance_fraction"] == 0.5
    assert "groups/zero_variance_fraction" not in SampledBatch([], lost).metrics()
