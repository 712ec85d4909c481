"""TRIAL notes that returns have fallen since λ began, and warns once."""

import pytest
from method_updates import random_update, scored_rows
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from trial_ray import GRPO, TRIAL, TRIALConfig
from trial_ray.algorithms.methods import new_config
from trial_ray.metrics import LEARNER

UPDATE = random_update(0)


def method_of(**settings):
    config = new_config("trial")
    vars(config).update({"hindsight_start_iteration": 4, **settings})
    return config.method_class(config)


def fallen_returns(method, wins, first=1):
    """Return ``returns_fallen`` of each iteration, "-" if there is none, for rollouts that are all won ("1") or all lost."""
    fallen = ""
    for iteration, won in enumerate(wins, first):
        for group in UPDATE.groups:
            for trajectory in group.trajectories:
                trajectory.success = won == "1"
        metrics = method.prepare(scored_rows(UPDATE, method.config), UPDATE.groups, iteration)
        fallen += f"{metrics['returns_fallen']:.0f}" if "returns_fallen" in metrics else "-"
    return fallen


@pytest.mark.parametrize(
    ("settings", "wins", "fallen"),
    [
        # The iteration of the start is played without λ.
        ({}, "011000001", "000000012"),
        ({}, "111100001111", "000000012345"),
        ({}, "111111111", "000000000"),
        # Iterations that began before λ are not compared.
        ({"max_staleness": 2}, "1111000000", "0000000001"),
        # The first iteration is not among the last four without λ.
        ({"hindsight_start_iteration": 5}, "100000000", "000000000"),
        ({"hindsight_start_iteration": 2}, "110000", "000001"),
        ({"hindsight_start_iteration": 1}, "10000", "00000"),  # one iteration without λ is too few
        # Without λ or without all groups, nothing is compared.
        ({"hindsight_coeff": 0.0}, "111", "---"),
        ({"drop_zero_variance_groups": True}, "111", "---"),
    ],
)
def test_returns_of_four_iterations_are_compared_with_those_without_lambda(settings, wins, fallen):
    assert fallen_returns(method_of(**settings), wins) == fallen
    method, resumed = method_of(**settings), method_of(**settings)
    fallen_returns(method, wins[:-2])
    resumed.state = dict(method.state)
    assert fallen_returns(resumed, wins[-2:], first=len(wins) - 1) == fallen[-2:]


def test_fallen_returns_are_a_warning_once(monkeypatch, caplog):
    monkeypatch.setattr(GRPO, "_record_update", lambda *_: None)
    algo = TRIAL.__new__(TRIAL)
    algo._iteration, algo.config = 8, TRIALConfig().training(hindsight_start_iteration=5)
    for fallen in (0, 1, 2):
        algo.metrics = MetricsLogger(root=True)
        for name, value in {"returns_fallen": fallen, "return_before": 0.5, "return_recent": 0.25}.items():
            algo.metrics.log_value(tuple(f"{LEARNER}trial/{name}".split("/")), value)
        algo._record_update()
    (message,) = caplog.messages
    assert "iteration 9: with λ the mean return of the last 4 iterations is 0.25, before it was 0.50" in message
    assert "hindsight_coeff=0 from a checkpoint before iteration 5" in message
