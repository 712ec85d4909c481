"""Intervals and tests against slow second implementations and values that were calculated by hand."""

import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from evaluation_samples import evaluation
from numpy.random import default_rng
from scipy import stats

from trial_ray.evaluation.comparison import ComparisonError, PairedComparison, paired_comparison
from trial_ray.evaluation.statistics import (
    bootstrap_mean,
    holm,
    mcnemar_exact,
    mean_interval,
    paired_difference_interval,
    seed_interval,
    wilson_interval,
)


def test_values_calculated_by_hand():
    assert wilson_interval(3, 10) == pytest.approx((0.107791, 0.603222), abs=1e-6)
    assert wilson_interval(0, 0) == (0, 1)
    assert mcnemar_exact(0, 0) == 1
    assert mcnemar_exact(10, 2) == pytest.approx(2 * (1 + 12 + 66) / 2**12)
    # (12 + 1)/102 - (4 + 1)/102 = 8/102; variance term (18/102 - (8/102)^2)/102.
    half = 1.959963984540054 * math.sqrt((18 / 102 - (8 / 102) ** 2) / 102)
    assert paired_difference_interval(12, 4, 100) == pytest.approx((8 / 102 - half, 8 / 102 + half))
    # Holm: the smallest times 4, the next times 3, and none below a smaller one.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.5]) == [1.0, 1.0]
    assert holm([]) == []


def test_paired_comparison_counts_tasks_that_both_finished():
    after = evaluation([1, 0, 1, 1, 1])
    after.episodes.reverse()
    assert paired_comparison(evaluation([0, 1, 0, 1, 0], failed=1), after) == PairedComparison(
        4, 0.5, 0.75, 2, 1, 0.25, paired_difference_interval(2, 1, 4), pytest.approx(1.0), "exact McNemar test", 1
    )


def repeated(rows):
    """Return an evaluation with several episodes of each task, of which a row has the successes."""
    result = evaluation([0] * len(rows), rollouts=len(rows[0]))
    tasks = zip(result.episodes, rows, strict=True)
    result.episodes = [replace(episode, success=bool(won)) for episode, row in tasks for won in row]
    return result


ROWS = default_rng(5).random((30, 4)) < np.linspace(0, 0.8, 30)[:, None]


def test_pass_at_k_counts_the_drawn_sets_with_a_success():
    """The estimate of a task is the share of all sets of k of its episodes in which one succeeds."""
    found = repeated(ROWS).pass_at()
    for k, (mean, (low, high)) in enumerate(found, 1):
        shares = np.array([np.mean([any(drawn) for drawn in combinations(row, k)]) for row in ROWS])
        assert mean == pytest.approx(shares.mean())
        drawn = default_rng(1).choice(shares, (4_000, len(shares))).mean(1)
        assert (low, high) == pytest.approx(np.quantile(drawn, [0.025, 0.975]), abs=0.02)
    assert len(found) == 4
    assert repeated(ROWS).overall.interval == found[0][1]
    assert evaluation([1, 0]).pass_at() == []


def test_tasks_are_the_blocks_of_a_comparison_with_several_episodes():
    before = repeated(ROWS)
    after = repeated(ROWS | (default_rng(2).random(ROWS.shape) < 0.2))
    result = paired_comparison(before, after)
    rates = [np.reshape([each.success for each in part.episodes], (30, 4)).mean(1) for part in (after, before)]
    test = stats.ttest_rel(*rates)
    assert result.pairs == 30
    assert result.lost == 0
    assert result.p_value == pytest.approx(test.pvalue)
    assert result.interval == pytest.approx(test.confidence_interval(0.95))
    assert result.difference == pytest.approx(after.success_rate - before.success_rate)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (evaluation([1, 0]), replace(evaluation([1]), protocol=evaluation([1, 0]).protocol)),  # other tasks
        (evaluation([1]), evaluation([1], temperature=1.0)),
        (evaluation([]), evaluation([])),
        (evaluation([1], failed=1), evaluation([1])),
        (replace(evaluation([1]), episodes=evaluation([1]).episodes * 2), evaluation([1])),  # one task twice
    ],
)
def test_unpaired_evaluations_are_refused(before, after):
    with pytest.raises(ComparisonError):
        paired_comparison(before, after)


@pytest.mark.parametrize("shape", [(1, 25), (6, 8)])
def test_bootstrap_agrees_with_drawing_one_by_one(shape):
    """The second implementation draws the indices of seeds and of tasks, and averages the values that they select."""
    values = default_rng(3).normal(0.2, 1.0, shape)
    draw = default_rng(2)
    interval = bootstrap_mean(values, resamples=20_000, seed=1)
    slow = np.array([values[np.ix_(*(draw.choice(size, size) for size in shape))].mean() for _ in range(4_000)])
    assert interval.mean == pytest.approx(values.mean())
    assert interval.over_seeds == seed_interval(values.mean(1))
    assert (interval.low, interval.high) == pytest.approx(np.quantile(slow, [0.025, 0.975]), abs=0.15 * slow.std())
    assert interval.p_value == pytest.approx(2 * min((slow <= 0).mean(), (slow >= 0).mean()), abs=0.04)


def test_constant_differences_are_certain():
    same = default_rng(0).random((3, 20))
    equal = bootstrap_mean(same - same)
    shifted = bootstrap_mean(same + 0.25 - same)
    assert equal.p_value == equal.over_seeds.p_value == 1.0
    assert shifted.over_seeds.p_value == 0.0
    assert shifted.p_value == pytest.approx(1e-4)


def test_stricter_test_has_the_larger_p_value():
    seeds = bootstrap_mean(np.repeat([[0.05], [0.2], [0.3]], 400, axis=1))  # a bootstrap over three seeds is too narrow
    assert seeds.p_value < 0.05 < seeds.over_seeds.p_value
    assert seeds.stricter == (seeds.over_seeds, "paired t-test over 3 seeds")
    # Three seeds that hardly differ, on 20 tasks that do.
    values = np.tile(default_rng(0).normal(0.1, 1, 20), (3, 1)) + np.array([[0.0], [1e-3], [2e-3]])
    tasks = bootstrap_mean(values)
    assert tasks.over_seeds.p_value < 0.05 < tasks.p_value
    assert tasks.stricter == (tasks, "bootstrap over 3 seeds and the tasks")


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_scores_without_spread_have_the_wilson_interval(value):
    values = np.full((3, 16), value)
    for successes in (False, True):
        assert mean_interval(values, successes=successes) == wilson_interval(int(48 * value), 48)
    values[0, 0] = 0.5
    interval = bootstrap_mean(values)
    assert mean_interval(values, successes=False) == (interval.low, interval.high)


def test_bootstrap_is_repeatable_and_checks_its_values():
    values = default_rng(5).random((3, 40))
    assert bootstrap_mean(values) == bootstrap_mean(values) != bootstrap_mean(values, seed=1)
    for wrong in (np.zeros(3), np.zeros((0, 4)), np.array([[np.nan]])):
        with pytest.raises(ValueError, match="shape"):
            bootstrap_mean(wrong)
