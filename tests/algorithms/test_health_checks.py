"""Every check: what violates it, what is too little to, and what follows."""

import math

import pytest
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from trial_ray import GRPOConfig
from trial_ray.algorithms.health_checks import HealthChecks
from trial_ray.errors import TrainingDivergedError
from trial_ray.metrics import ENV_RUNNERS, LEARNER

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
    "max_kl": ({"grpo/kl": 5.1}, "5.1 nats per token"),
    "max_mean_ratio": ({"grpo/ratio_mean": math.inf}, "importance ratio is inf"),
    "min_entropy": ({"grpo/entropy": 0.9e-4}, "collapsed to 9e-05 nats"),
    "min_response_tokens": ({"num_response_tokens": 100.0}, "collapsed to 1 tokens"),
    "max_cut_response_rate": ({"cut_response_rate": 1.0}, "100.0% of the responses end"),
    "min_valid_rate": ({"invalid_action_rate": 0.995}, "only 0.50% of the turns are valid"),
}
COLLAPSES = ("min_entropy", "min_response_tokens", "max_cut_response_rate", "min_valid_rate")
NEAR = {
    "grpo/kl": 4.9, "grpo/ratio_mean": 9.0, "grpo/entropy": 2e-4, "num_response_tokens": 151.0, "cut_response_rate": 0.999,
    "invalid_action_rate": 0.98,
}  # fmt: skip
"""Bad, but not yet beyond any limit."""


def health_checks(of=None, **settings):
    """With these settings, continued from where others are, as after a resume."""
    made = HealthChecks(GRPOConfig().health_checks(**{"health_check_patience": 3, "max_update_kl": None, **settings}))
    if of:
        made.set_state(of.get_state())
    return made


def judge(made, iteration, **changed):
    """Check an iteration that is healthy except for the changed metrics."""
    metrics = {}
    for name, value in (HEALTHY | changed).items():
        metrics[(LEARNER if "/" in name or name == "total_loss" else ENV_RUNNERS) + name] = value
    return made.check(iteration, metrics)


@pytest.mark.parametrize("name", VIOLATIONS)
def test_a_check_warns_and_stops_after_its_patience_also_if_continued(name, caplog):
    """One that only warns never stops a run, nor keeps it from saving."""
    found, words = VIOLATIONS[name]
    made, warning = health_checks(), health_checks(health_check_action="warn")
    for each in (made, warning):
        assert judge(each, 0) == judge(each, 1, **NEAR) == 0  # from where a collapse is not sudden
    assert not caplog.records
    for iteration in (2, 3, 4):
        made.require_healthy()
        made = health_checks(made)
        assert judge(made, iteration, **found) == judge(warning, iteration, **found) == 1
        assert words in caplog.records[-1].getMessage()
        assert (made.suspect, warning.suspect) == (True, False)
    warning.require_healthy()
    with pytest.raises(TrainingDivergedError, match=r"after iteration 4: .*for 3 iterations in a row.*settings: \w+"):
        made.require_healthy()


@pytest.mark.parametrize("name", VIOLATIONS)
def test_a_collapse_from_one_iteration_to_the_next_stops_after_the_second(name):
    """The limits of KL and ratio have no good side far from them: a value just beyond is no collapse."""
    found, _ = VIOLATIONS[name]
    made = health_checks(health_check_patience=5)
    for iteration in range(14):  # one such iteration may be noise
        judge(made, iteration, **(found if iteration % 2 else {}))
        made.require_healthy()
    made = health_checks(made, health_check_patience=5)
    judge(made, 14, **found)
    if name not in COLLAPSES:
        made.require_healthy()
        return
    with pytest.raises(TrainingDivergedError, match=r"Stopped after iteration 14: .*for 2 iterations in a row"):
        made.require_healthy()


@pytest.mark.parametrize("name", sorted(VIOLATIONS.keys() - {"finite"}))
def test_none_switches_a_check_off_also_on_resume(name):
    (found, _), watched = VIOLATIONS[name], health_checks()
    judge(watched, 1)
    judge(watched, 1, **found)
    for made in (health_checks(**{name: None}), health_checks(watched, **{name: None})):
        assert [judge(made, 3, **changed) for changed in (found, {}, found, found, found)] == [0] * 5
        assert not made.suspect
        assert not any(name in remembered for remembered in made.get_state().values())


@pytest.mark.parametrize("name", COLLAPSES)
def test_a_policy_that_never_was_any_better_has_not_collapsed(name):
    """As an untrained one, whose responses all reach the limit and whose actions nobody understands."""
    made = health_checks()
    for iteration in range(20):
        assert judge(made, iteration, **NEAR | VIOLATIONS[name][0]) == 0


def test_an_iteration_is_looked_at_as_it_was_logged():
    """Means of this iteration and not of the run, NaN included; without an update nothing is said of the learner."""
    metrics, made = MetricsLogger(root=True), health_checks()
    for iteration, (kl, loss, expected) in enumerate([(0.1, 0.2, 0), (9.0, math.nan, 2), (0.1, 0.2, 0)], start=1):
        learner = MetricsLogger()
        learner.log_value(("default_policy", "grpo", "kl"), kl, reduce="mean")
        learner.log_value(("default_policy", "total_loss"), loss, reduce="mean")
        metrics.aggregate([learner.reduce()], key="learners")
        if expected:  # the one before still holds
            made.check_iteration(iteration, metrics, trained=False)
            assert not made.suspect
        made.check_iteration(iteration, metrics, trained=True)
        assert float(metrics.reduce()["health_checks"]["num_failed"]) == expected


def test_an_update_that_moves_the_policy_far_is_warned_of_at_once(caplog):
    made = health_checks(max_update_kl=0.1)
    assert judge(made, 1, **{"grpo/update_kl": 0.1, "invalid_action_rate": 0.09}) == 0
    assert judge(made, 2, invalid_action_rate=0.17) == 0
    assert not caplog.records
    assert judge(made, 3, **{"grpo/update_kl": 0.16, "invalid_action_rate": 0.17}) == 0
    made = health_checks(made, max_update_kl=0.1)
    assert judge(made, 4, invalid_action_rate=0.52) == 0
    assert [record.args[:2] for record in caplog.records] == [
        (3, "the update moved the policy by 0.16 nats per token (max_update_kl=0.1)"),
        (4, "the share of invalid turns rose from 17% to 52% after the last update"),
    ]
    silent = health_checks(made)
    judge(silent, 5, **{"grpo/update_kl": 9.0, "invalid_action_rate": 0.98})
    assert len(caplog.records) == 2
