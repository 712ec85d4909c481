"""Intervals and tests of success rates, held against SciPy and against values worked out by hand."""

import math

import pytest
from scipy import stats

from trial_ray.evaluation.comparison import ComparisonError, paired_comparison
from trial_ray.evaluation.results import EvaluationResult
from trial_ray.evaluation.statistics import holm, mcnemar_exact, paired_difference_interval, wilson_interval
from trial_ray.rollout.trajectory import EpisodeResult


def evaluation(outcomes, protocol=None, ended=None):
    episodes = [
        EpisodeResult(task, "look", bool(won), float(won), 5, (ended or {}).get(task, "terminated"))
        for task, won in outcomes.items()
    ]
    return EvaluationResult({"split": "valid_seen"} if protocol is None else protocol, episodes)


@pytest.mark.parametrize(
    ("successes", "trials"), [(0, 1), (1, 1), (0, 140), (140, 140), (3, 10), (97, 256), (133, 134)]
)
def test_wilson_agrees_with_scipy(successes, trials):
    expected = stats.binomtest(successes, trials).proportion_ci(0.95, method="wilson")
    assert wilson_interval(successes, trials) == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert wilson_interval(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("gained", "lost"), [(1, 0), (5, 0), (0, 5), (10, 2), (7, 7), (40, 21), (150_500, 149_500), (2_000_000, 0)]
)
@pytest.mark.timeout(20)
def test_mcnemar_is_the_two_sided_binomial_test_of_the_changed_tasks(gained, lost):
    expected = stats.binomtest(gained, gained + lost).pvalue
    assert mcnemar_exact(gained, lost) == pytest.approx(expected, rel=1e-9 if gained < 1000 else 1e-6)
    assert mcnemar_exact(0, 0) == 1.0


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
        (evaluation({"a": 1}), evaluation({"a": 1, "b": 1}), "different tasks"),
        (evaluation({"a": 1}), evaluation({"a": 1}, {"split": "valid_unseen"}), "split is 'valid_seen' before"),
        (evaluation({"a": 1}), evaluation({"a": 1}, {"split": "valid_seen", "temperature": 0}), "temperature"),
        (evaluation({}), evaluation({}), "nothing to compare"),
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
