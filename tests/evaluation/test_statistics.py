"""Intervals and tests held against slow second implementations and values worked out by hand."""

import math
import random

import numpy as np
import pytest
from scipy import stats

from trial_ray.evaluation.comparison import ComparisonError, paired_comparison
from trial_ray.evaluation.results import EvaluationResult
from trial_ray.evaluation.statistics import (
    bootstrap_mean,
    holm,
    mcnemar_exact,
    mean_interval,
    paired_difference_interval,
    wilson_interval,
)
from trial_ray.trajectory import EpisodeResult


def evaluation(outcomes, protocol=None, ended=None):
    episodes = [
        EpisodeResult(task, "look", bool(won), float(won), 5, (ended or {}).get(task, "terminated"))
        for task, won in outcomes.items()
    ]
    return EvaluationResult({"split": "valid_seen"} if protocol is None else protocol, episodes)


def test_wilson_interval_against_a_value_worked_out_by_hand():
    assert wilson_interval(3, 10) == pytest.approx((0.107791, 0.603222), abs=1e-6)
    assert wilson_interval(0, 0) == (0, 1)


def test_mcnemar_is_the_two_sided_binomial_test_of_the_changed_tasks():
    assert mcnemar_exact(0, 0) == 1
    assert mcnemar_exact(10, 2) == pytest.approx(2 * (1 + 12 + 66) / 2**12)


def test_paired_interval_against_a_value_worked_out_by_hand():
    # (12 + 1)/102 - (4 + 1)/102 = 8/102; variance term (18/102 - (8/102)^2)/102.
    half = 1.959963984540054 * math.sqrt((18 / 102 - (8 / 102) ** 2) / 102)
    assert paired_difference_interval(12, 4, 100) == pytest.approx((8 / 102 - half, 8 / 102 + half))


def test_paired_comparison_counts_the_tasks_that_both_finished_whatever_the_order():
    before = evaluation({"a": 0, "b": 1, "c": 0, "d": 1, "e": 0}, ended={"e": "failed"})
    after = evaluation({"e": 1, "d": 1, "c": 1, "b": 0, "a": 1})
    result = paired_comparison(before, after)
    assert (result.pairs, result.gained, result.lost, result.excluded) == (4, 2, 1, 1)
    assert (result.before, result.after, result.difference) == (0.5, 0.75, 0.25)
    assert result.p_value == pytest.approx(1.0)
    assert result.interval[0] < 0.25 < result.interval[1]


ONCE = evaluation({"a": 1})


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (evaluation({"a": 1}), evaluation({"b": 1}), "different tasks"),
        (evaluation({"a": 1}), evaluation({"a": 1}, {"split": "valid_unseen"}), "split is 'valid_seen' before"),
        (evaluation({}), evaluation({}), "nothing to compare"),
        (evaluation({"a": 1}, ended={"a": "failed"}), evaluation({"a": 1}), "completed in both"),
        (EvaluationResult(ONCE.protocol, ONCE.episodes * 2), ONCE, "more than once"),
    ],
)
def test_paired_comparison_refuses_what_is_not_a_pair(before, after, words):
    with pytest.raises(ComparisonError, match=words):
        paired_comparison(before, after)


def test_holm_adjusts_for_the_number_of_comparisons():
    """Worked out by hand: the smallest times 4, the next times 3, and none below one before it."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.5]) == [1.0, 1.0]
    assert holm([]) == []


def reference_means(values, resamples, seed):
    """Draw seeds and tasks one by one with another generator, and average what they select."""
    draw = random.Random(seed)
    rows, columns = len(values), len(values[0])
    means = []
    for _ in range(resamples):
        chosen_rows = [draw.randrange(rows) for _ in range(rows)]
        chosen_columns = [draw.randrange(columns) for _ in range(columns)]
        means.append(sum(values[r][c] for r in chosen_rows for c in chosen_columns) / (rows * columns))
    return np.array(means)


@pytest.mark.parametrize("shape", [(1, 25), (6, 8)])
def test_intervals_agree_with_drawing_one_by_one(shape):
    values = np.random.default_rng(3).normal(0.2, 1.0, shape)
    found = bootstrap_mean(values, resamples=20_000, seed=1)
    slow = reference_means(values.tolist(), 4_000, seed=2)
    spread = slow.std()
    assert found.mean == pytest.approx(values.mean())
    low, high = np.quantile(slow, [0.025, 0.975])
    assert abs(found.low - low) < 0.15 * spread
    assert abs(found.high - high) < 0.15 * spread
    assert found.p_value == pytest.approx(2 * min((slow <= 0).mean(), (slow >= 0).mean()), abs=0.04)


def test_no_difference_is_certain_and_a_constant_one_too():
    same = np.random.default_rng(0).random((3, 20))
    equal, shifted = bootstrap_mean(same - same), bootstrap_mean(same + 0.25 - same)
    assert equal.p_value == equal.over_seeds.p_value == 1.0
    assert shifted.over_seeds.p_value == 0.0
    assert (shifted.low, shifted.high) == pytest.approx((0.25, 0.25))
    assert shifted.p_value == pytest.approx(1e-4)


def test_the_interval_over_seeds_is_the_paired_t_test():
    draw = np.random.default_rng(3)
    first, second = draw.random((3, 30)), draw.random((3, 30)) + 0.05
    found = bootstrap_mean(second - first).over_seeds
    test = stats.ttest_rel(second.mean(1), first.mean(1))
    interval = test.confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    assert found.p_value == pytest.approx(test.pvalue)


def test_the_stricter_test_has_the_larger_p_value():
    rows = np.repeat([[0.05], [0.2], [0.3]], 400, axis=1)  # three seeds, which a bootstrap over them is too sure of
    found = bootstrap_mean(rows)
    assert found.p_value < 0.05 < found.over_seeds.p_value
    assert found.stricter == (found.over_seeds, "paired t-test over 3 seeds")
    tasks = np.tile(np.random.default_rng(0).normal(0.1, 1, 20), (3, 1)) + np.array([[0.0], [1e-3], [2e-3]])
    found = bootstrap_mean(tasks)  # seeds that hardly differ on 20 tasks that do
    assert found.over_seeds.p_value < 0.05 < found.p_value
    assert found.stricter == (found, "bootstrap over 3 seeds and the tasks")


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_scores_without_any_spread_have_the_wilson_interval(value):
    values = np.full((3, 16), value)
    assert mean_interval(values, successes=False) == wilson_interval(int(48 * value), 48)
    assert mean_interval(values, successes=True) == wilson_interval(int(48 * value), 48)
    values[0, 0] = 0.5
    low, high = mean_interval(values, successes=False)
    assert (low, high) == (bootstrap_mean(values).low, bootstrap_mean(values).high)


def test_it_can_be_repeated_and_depends_on_its_seed():
    values = np.random.default_rng(5).random((3, 40))
    assert bootstrap_mean(values) == bootstrap_mean(values)
    assert bootstrap_mean(values, seed=1) != bootstrap_mean(values)


@pytest.mark.parametrize("values", [np.zeros(3), np.zeros((0, 4)), np.array([[np.nan]])])
def test_wrong_values_are_refused(values):
    with pytest.raises(ValueError, match="shape"):
        bootstrap_mean(values)
