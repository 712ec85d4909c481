"""Which task is next: passes over every environment's list, environments in proportion to their weights."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from rejections import misconfigured, rejected

from trial_ray.algorithms.tasks import SuccessRateSampler, TaskSampler
from trial_ray.rollout.groups import GroupRequest, GroupSample, RolloutCounts
from trial_ray.trajectory import EpisodeResult

LISTS = [[f"{name}{number}" for number in range(size)] for name, size in (("a", 5), ("b", 3), ("c", 40))]


@pytest.mark.parametrize("weights", [(1, 1, 1), (1000, 1, 500.5)])
def test_environments_are_drawn_in_proportion_to_their_weights(weights):
    environments = [request.environment for request in TaskSampler(LISTS, 0, weights).draw(300, 2)]
    counts = np.eye(3)[environments].cumsum(0)
    shares = np.outer(range(1, 301), weights) / sum(weights)
    assert (abs(counts - shares) < 1).all()


def test_a_pass_holds_every_task_once_and_the_next_in_another_order():
    requests = TaskSampler(LISTS, 3, [5, 3, 0.001]).draw(16, 2)
    for environment, size in ((0, 5), (1, 3)):
        tasks = [request.task_id for request in requests if request.environment == environment]
        assert sorted(tasks[:size]) == sorted(tasks[size : 2 * size]) == LISTS[environment]
    many = [request.task_id for request in TaskSampler([LISTS[2]], 3).draw(80, 2)]
    assert many[:40] != many[40:]


def test_draws_resume_where_they_ended_and_begin_with_what_was_put_back():
    whole = TaskSampler(LISTS, 1, [3, 2, 1]).draw(30, 2)
    first, resumed = (TaskSampler(LISTS, seed, [3, 2, 1]) for seed in (1, 99))
    drawn = first.draw(7, 4)
    assert first.get_state() == {"seed": 1, "drawn": [4, 2, 1], "returned": []}
    first.put_back(drawn[5:])
    resumed.set_state(first.get_state(in_flight=drawn[3:5]))
    for number, expected in ((3, whole[3:6]), (24, whole[6:])):
        assert resumed.draw(number, 2) == [replace(request, index=index) for index, request in enumerate(expected)]
    assert [request.seed for request in whole[:7]] == [request.seed for request in drawn]
    assert len({request.seed for request in whole}) == 30


TASKS = [f"t{number}" for number in range(20)]


def ended(task, *successes, failed=0):
    """A group of a task, of which ``failed`` more rollouts failed by an engine."""
    whole = [EpisodeResult(task, "", success, 0.0, 1, "terminated") for success in successes]
    lost = [EpisodeResult(task, "", True, 0.0, 0, "failed")] * failed
    return GroupSample(GroupRequest(0, task, 4, 0), None, [*whole, *lost], [], 4, 4, False, RolloutCounts())


def experienced():
    """Of 20 tasks 8 are always solved, 8 never, 2 half of the time, and 2 were never played."""
    sampler = SuccessRateSampler([TASKS], 0)
    outcomes = [[True, True]] * 8 + [[False, False]] * 8 + [[True, False]] * 2
    for _ in range(6):
        for task, solved in zip(TASKS, outcomes, strict=False):
            sampler.note(ended(task, *solved * 4))
    return sampler


def test_tasks_that_are_solved_sometimes_or_are_new_are_drawn_more_often():
    sampler = experienced()
    counts = Counter(sampler.draw(1, 4)[0].task_id for _ in range(3000))
    assert counts.keys() == {*TASKS}
    assert min(counts[task] for task in TASKS[16:]) > 2.5 * max(counts[task] for task in TASKS[:16])
    for task in TASKS[16:]:  # p = 1/2; of the others p is 1/18, nearly, as earlier groups count half
        assert counts[task] / 3000 == pytest.approx(0.9 * 0.25 / (4 * 0.25 + 16 * 17 / 18**2) + 0.1 / 20, rel=0.2)
    assert sorted(request.task_id for request in sampler.draw(20, 4)) == sorted(TASKS), "no task twice in a call"
    found = sampler.metrics()
    assert (found["tasks/seen_fraction"], found["tasks/success_rate_p50"]) == (0.9, 0.5)
    assert 4 / 20 < found["tasks/effective_fraction"] < 1.0


def test_recent_groups_count_more_and_failed_rollouts_do_not():
    sampler = SuccessRateSampler([TASKS[:1]], 0)
    for successes in ([False] * 4, [True] * 4):
        sampler.note(ended("t0", *successes, failed=3))
    assert sampler.metrics()["tasks/success_rate_p50"] == (4 + 1) / (4 + 2 + 2)
    sampler.note(ended("gone", True))


def test_success_rates_resume_also_in_a_run_that_was_uniform():
    sampler = experienced()
    state = json.loads(json.dumps(sampler.get_state()))
    resumed = SuccessRateSampler([TASKS], 9)
    resumed.set_state(state)
    assert resumed.draw(12, 4) == sampler.draw(12, 4)
    assert resumed.metrics() == sampler.metrics()
    resumed.set_state(TaskSampler([TASKS], 0).get_state())
    assert resumed.metrics()["tasks/seen_fraction"] == 0.0
    SuccessRateSampler([TASKS, []], 0, [1.0, 0.0]).metrics()


def test_a_state_of_other_environments_is_refused():
    state = {"seed": 0, "drawn": [3]}
    rejected(r"other environments \(\[3\]\); the config has 3", TaskSampler(LISTS, 0).set_state, state)


@pytest.mark.parametrize(("lists", "told"), [([], "No environment was chosen"), ([["a"], []], "has no tasks")])
def test_an_environment_without_tasks_is_refused(lists, told):
    misconfigured(told, TaskSampler, lists, 0)
