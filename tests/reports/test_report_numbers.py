"""Numbers of a report: which tasks, runs and iterations they count, and which of them are not combined."""

from pathlib import Path

import evaluation_samples
import numpy as np
import pytest
from synthetic_run import recorded_run

from trial_ray.adapters import alfworld
from trial_ray.metrics import EVALUATION_SUCCESS, TRAINING_SUCCESS, TURN_SCORE
from trial_ray.reports.charts import curve_chart
from trial_ray.reports.groups import group_runs
from trial_ray.reports.page import difference_rows, family_rows, success_rows
from trial_ray.runs.evaluations import read_name

LAST = 12
"""Iterations of the runs."""


def evaluation(won, tasks, failed=0):
    """Return an evaluation in which the first ``won`` tasks are solved and the last ``failed`` end by an error."""
    return evaluation_samples.evaluation(np.arange(tasks) < won, split="generated", families=("look",), failed=failed)


def run(seed=0, method="GRPO", last=LAST, evaluations=None):
    """Return a run with evaluations by iteration."""
    return recorded_run(
        Path(f"{method}-{seed}"),
        method=method,
        settings={"seed": seed},
        environments={"ALFWorld-v0": alfworld.ADAPTER},
        metrics=[{"iteration": number, TRAINING_SUCCESS: 0.3, TURN_SCORE: 0.2} for number in range(1, last + 1)],
        evaluations={"": evaluations} if evaluations else {},
    )


def seeds(*results):
    return [run(seed, evaluations={LAST: result}) for seed, result in enumerate(results)]


def success(*runs):
    """Return the iterations, success after training and before, and change, of runs that form one group."""
    (row,) = success_rows(group_runs(runs))
    return row[2:]


def points(*runs):
    return curve_chart(EVALUATION_SUCCESS, group_runs(runs))["series"][0]


def test_newest_evaluation_is_the_result():
    early = run(evaluations={0: evaluation(6, 48), 4: evaluation(1, 48)})
    early.metrics[7][EVALUATION_SUCCESS] = 0.5
    (curve,) = points(early)["runs"]
    assert curve["x"] == [0, 4, 8]
    assert curve["y"] == [6 / 48, 1 / 48, 0.5]
    assert success(early)[:3] == ["4 of 12", "2.1% [0.4%, 10.9%] of 48", "12.5% [5.9%, 24.7%] of 48"]
    both = run(evaluations={4: evaluation(1, 48), LAST: evaluation(12, 48)})
    assert points(both)["runs"][0]["x"] == [4, 12]
    assert success(both) == ["12", "25.0% [14.9%, 38.8%] of 48", "–", "–"]


def test_environment_names_may_end_in_a_number():
    names = ("before_Shop.json", "before_Shop_000007.json", "after_Shop_2_000012.json", "x.json")
    played = [("Shop", 0), ("Shop_000007", 0), ("Shop_2", 12), None]
    assert [*map(read_name, map(Path, names))] == played


def test_failed_tasks_are_not_counted():
    *others, change = success(run(evaluations={0: evaluation(6, 48), LAST: evaluation(0, 48, failed=40)}))
    assert others == ["12", "0.0% [0.0%, 32.4%] of 8, 40 failed", "12.5% [5.9%, 24.7%] of 48"]
    assert "(8 tasks, " in change
    assert "48 of 48 failed" in success(run(evaluations={LAST: evaluation(0, 48, failed=48)}))[1]


EVALUATION_SETS = seeds(evaluation(24, 48), evaluation(0, 20))
LENGTHS = [*seeds(evaluation(24, 48)), run(1, last=6, evaluations={6: evaluation(3, 48)})]


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        (EVALUATION_SETS, "num_tasks is 48 in one and 20 in another"),
        (seeds(evaluation(24, 48), evaluation(0, 48, failed=40)), "(48 and 8)"),
        (LENGTHS, "12 and 6 iterations"),
    ],
)
def test_different_tasks_or_lengths_are_not_averaged(runs, words):
    trained, after, *others = success(*runs)
    assert words in after
    assert [trained, *others] == ["–"] * 3


def test_runs_that_cannot_be_averaged_have_no_curve_family_or_difference():
    assert points(*EVALUATION_SETS)["mean"] == []
    assert family_rows(group_runs(EVALUATION_SETS)) == family_rows(group_runs(LENGTHS)) == []
    others = [run(seed, "TRIAL", evaluations={LAST: evaluation(20, 48)}) for seed in (0, 1)]
    rows, missing = difference_rows(group_runs([*LENGTHS, *others]))
    assert rows == []
    assert len(missing) == 1
    failing = seeds(*[evaluation(24, 48, failed=8)] * 2)
    for member in failing:
        member.evaluations[""][0] = evaluation(6, 48)
    assert "(48 and 40)" in success(*failing)[-1]


def test_numbers_name_the_evaluated_runs():
    runs = seeds(evaluation(24, 48), evaluation(12, 48))
    runs[0].evaluations[""][0] = evaluation(6, 48)
    _, after, before, change = success(*runs)
    assert after.startswith("37.5%")
    assert before.startswith("12.5%")
    assert before.endswith("(1 of 2 runs)")
    assert change.startswith("+37.5 [")
    runs.append(run(2))
    assert success_rows(group_runs(runs))[0][0] == points(*runs)["name"] == "GRPO (2 of 3 seeds)"
    assert curve_chart(TURN_SCORE, group_runs(runs))["series"][0]["name"] == "GRPO (3 seeds)"


def test_entropy_is_relative_to_the_first_iteration():
    key = "learners/default_policy/grpo/entropy"
    played = run()
    played.metrics = [{"iteration": number, key: 0.8 / number} for number in (1, 2, 4)]
    assert curve_chart(key, group_runs([played]))["series"][0]["mean"] == pytest.approx([1.0, 0.5, 0.25])
