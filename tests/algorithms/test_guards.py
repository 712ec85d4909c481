"""Every guard: what violates it, what is too little to, and what follows."""

from __future__ import annotations

import math

import pytest
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from trial_ray.algorithms import GRPOConfig
from trial_ray.algorithms.guards import GUARDS, Guards
from trial_ray.errors import TrainingDivergedError

HEALTHY = {
    "total_loss": 0.1,
    "grpo/surrogate_loss": 0.1,
    "grpo/clip_fraction": 0.0,
    "grpo/kl": 0.005,
    "grpo/entropy": 0.4,
    "grpo/ratio_mean": 1.0,
    "engine/ratio_mean": 1.0,
    "num_response_tokens": 500.0,
    "num_env_steps_sampled": 100.0,
    "cut_response_rate": 0.0,
    "invalid_response_rate": 0.0,
    "invalid_action_rate": 0.15,
}
"""As the tuned example for this kind of machine logs them."""
VIOLATIONS = {
    "finite": ({"total_loss": math.nan}, "1 of the losses are not finite"),
    "max_kl": ({"grpo/kl": 5.1}, "5.1 nats a token"),
    "max_mean_ratio": ({"grpo/ratio_mean": math.inf}, "importance ratio is inf"),
    "min_entropy": ({"grpo/entropy": 0.9e-4}, "collapsed to 9e-05 nats"),
    "min_response_tokens": ({"num_response_tokens": 100.0}, "collapsed to 1 tokens"),
    "max_cut_response_rate": ({"cut_response_rate": 1.0}, "100.0% of the responses end"),
    "min_valid_rate": ({"invalid_action_rate": 0.995}, "only 0.50% of the turns are valid"),
}
COLLAPSES = ("min_entropy", "min_response_tokens", "max_cut_response_rate", "min_valid_rate")
NEAR = {"grpo/kl": 4.9, "grpo/ratio_mean": 9.0, "grpo/entropy": 2e-4, "num_response_tokens": 151.0} | {
    "cut_response_rate": 0.999,
    "invalid_action_rate": 0.98,
}
"""Bad, but not yet beyond any limit."""


def guards(**settings) -> Guards:
    return Guards(GRPOConfig().guards(**{"guard_patience": 3, **settings}))


def test_every_guard_is_tested():
    assert {guard.name for guard in GUARDS} == VIOLATIONS.keys()


@pytest.mark.parametrize("name", VIOLATIONS)
def test_a_guard_warns_and_stops_after_its_patience(name, caplog):
    found, words = VIOLATIONS[name]
    made = guards()
    assert made.judge(0, HEALTHY) == made.judge(1, HEALTHY | NEAR) == 0  # from where a collapse is not sudden
    assert not caplog.records
    for iteration in (2, 3, 4):
        made.require_healthy()
        assert made.judge(iteration, HEALTHY | found) == 1
        assert made.suspect
        assert words in caplog.records[-1].getMessage()
    with pytest.raises(
        TrainingDivergedError, match=r"Stopped after iteration 4: .*for 3 iterations in a row.*settings: \w+"
    ):
        made.require_healthy()


@pytest.mark.parametrize("name", VIOLATIONS)
def test_a_healthy_iteration_in_between_begins_the_count_anew(name):
    found, _ = VIOLATIONS[name]
    made = guards()
    made.judge(0, HEALTHY)
    for iteration in range(12):
        made.judge(iteration, HEALTHY | (found if iteration % 3 else NEAR))
    made.require_healthy()


@pytest.mark.parametrize("name", VIOLATIONS)
def test_a_collapse_from_one_iteration_to_the_next_stops_after_the_second(name):
    """The limits of KL and ratio have no good side far from them: a value just beyond is no collapse."""
    found, _ = VIOLATIONS[name]
    made = guards(guard_patience=5)
    for iteration in range(0, 12, 2):  # one such iteration may be noise
        made.judge(iteration, HEALTHY)
        made.judge(iteration + 1, HEALTHY | found)
        made.require_healthy()
    made.judge(12, HEALTHY)
    made.judge(13, HEALTHY | found)
    made.judge(14, HEALTHY | found)
    if name not in COLLAPSES:
        made.require_healthy()
        return
    with pytest.raises(TrainingDivergedError, match=r"Stopped after iteration 14: .*for 2 iterations in a row"):
        made.require_healthy()


@pytest.mark.parametrize("name", COLLAPSES)
def test_a_collapse_is_sudden_in_a_continued_run_too_and_not_after_a_slow_one(name):
    found, _ = VIOLATIONS[name]
    first, second = guards(guard_patience=5), guards(guard_patience=5)
    first.judge(1, HEALTHY)
    second.set_state(first.get_state())
    second.judge(2, HEALTHY | found)
    first.set_state(second.get_state())
    first.judge(3, HEALTHY | found)
    with pytest.raises(TrainingDivergedError, match="for 2 iterations in a row"):
        first.require_healthy()
    slow = guards(guard_patience=5)
    slow.set_state({"armed": [name], "in_a_row": {}})  # of a checkpoint of an earlier version
    for iteration in range(4):
        slow.judge(iteration, HEALTHY | NEAR | found)
        slow.require_healthy()


def test_no_iteration_of_a_run_whose_lr_is_10_after_the_second_is_begun():
    """Entropy and share of cut responses as the tests' tiny run logged them: the first update leaves one token for each prompt."""
    made = Guards(GRPOConfig())
    played = {"num_response_tokens": 48.0, "num_env_steps_sampled": 12.0, "grpo/ratio_mean": 1.0, "grpo/kl": 0.0}
    made.judge(1, {**played, "grpo/entropy": 3.37, "cut_response_rate": 0.92, "grpo/kl": 5.0, "grpo/ratio_mean": 0.5})
    made.judge(2, {**played, "grpo/entropy": 0.0, "cut_response_rate": 1.0})
    made.require_healthy()
    made.judge(3, {**played, "grpo/entropy": 0.0, "cut_response_rate": 1.0})
    with pytest.raises(TrainingDivergedError, match="Stopped after iteration 3: the entropy has collapsed"):
        made.require_healthy()


@pytest.mark.parametrize("name", VIOLATIONS)
def test_what_warns_only_never_stops_nor_keeps_from_saving(name):
    made = guards(guard_action="warn")
    made.judge(1, HEALTHY)
    for iteration in range(2, 20):
        assert made.judge(iteration, HEALTHY | VIOLATIONS[name][0]) == 1
        assert not made.suspect
    made.require_healthy()


@pytest.mark.parametrize("name", sorted(VIOLATIONS.keys() - {"finite"}))
def test_none_switches_a_guard_off(name):
    made = guards(**{name: None})
    for found in (HEALTHY, *[HEALTHY | VIOLATIONS[name][0]] * 9):
        assert made.judge(1, found) == 0


@pytest.mark.parametrize("name", COLLAPSES)
def test_a_policy_that_never_was_any_better_has_not_collapsed(name):
    """As an untrained one, whose responses all reach the limit and whose actions nobody understands."""
    made = guards()
    for iteration in range(20):
        assert made.judge(iteration, HEALTHY | NEAR | VIOLATIONS[name][0]) == 0


def test_what_is_near_every_limit_violates_none():
    made = guards()
    for found in (HEALTHY, NEAR, NEAR):
        assert made.judge(1, HEALTHY | found) == 0


def test_an_iteration_without_an_update_says_nothing_of_the_learner():
    made = guards()
    made.judge(1, HEALTHY | VIOLATIONS["max_kl"][0])
    played = {name: value for name, value in HEALTHY.items() if "/" not in name and name != "total_loss"}
    assert made.judge(2, played) == 1  # still the one before
    assert made.judge(3, HEALTHY) == 0


def test_a_continued_run_counts_on():
    first, second = guards(), guards()
    for found in (HEALTHY, *[HEALTHY | VIOLATIONS["min_entropy"][0]] * 2):
        first.judge(1, found)
    second.set_state(first.get_state())
    second.judge(4, HEALTHY | VIOLATIONS["min_entropy"][0])
    with pytest.raises(TrainingDivergedError, match="collapsed"):
        second.require_healthy()


def test_an_iteration_is_looked_at_as_it_was_logged():
    """Means of this iteration and not of the run, NaN included; what was never logged is nothing to complain of."""
    metrics, made = MetricsLogger(root=True), guards()
    for iteration, (kl, loss, expected) in enumerate([(0.1, 0.2, 0), (9.0, math.nan, 2), (0.1, 0.2, 0)], start=1):
        learner, runner = MetricsLogger(), MetricsLogger()
        learner.log_value(("default_policy", "grpo", "kl"), kl, reduce="mean")
        learner.log_value(("default_policy", "total_loss"), loss, reduce="mean")
        runner.log_value("num_response_tokens", 500, reduce="sum")
        metrics.aggregate([learner.reduce()], key="learners")
        metrics.aggregate([runner.reduce()], key="env_runners")
        made.look(iteration, metrics, trained=True)
        assert float(metrics.reduce()["guards"]["num_violated"]) == expected


@pytest.mark.parametrize("name", sorted(VIOLATIONS.keys() - {"finite"}))
def test_a_guard_that_is_switched_off_on_resume_keeps_nothing_from_being_saved(name):
    first, second = guards(), guards(**{name: None})
    for found in (HEALTHY, HEALTHY | VIOLATIONS[name][0]):
        first.judge(1, found)
    second.set_state(first.get_state())
    assert second.judge(3, HEALTHY | VIOLATIONS[name][0]) == 0
    assert not second.suspect
    assert not any(name in remembered for remembered in second.get_state().values())
