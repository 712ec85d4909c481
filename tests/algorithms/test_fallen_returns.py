"""TRIAL notes that returns have fallen since λ began, and warns once."""

import pytest
from method_updates import random_update, scored_rows
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from trial_ray.algorithms.grpo import GRPO
from trial_ray.algorithms.methods import new_config
from trial_ray.algorithms.methods.trial import TRIAL, TRIALConfig
from trial_ray.metrics import LEARNER

UPDATE = random_update(0)


def method_of(**settings):
    config = new_config("trial")
    vars(config).update({"hindsight_start_iteration": 4, **settings})
    return config.method_class(config)


def fallen_returns(method, wins, first=1):
    """``returns_fallen`` of each iteration, whose rollouts are all won or all lost."""
    fallen = []
    for iteration, won in enumerate(wins, first):
        for group in UPDATE.groups:
            for trajectory in group.trajectories:
                trajectory.success = bool(won)
        metrics = method.prepare(scored_rows(UPDATE, method.config), UPDATE.groups, iteration)
        fallen.append(int(metrics.get("returns_fallen", -1)))
    return fallen


@pytest.mark.parametrize(
    ("settings", "wins", "fallen"),
    [
        # The iteration of the start is played without λ.
        ({}, [0, 1, 1, 0, 0, 0, 0, 0, 1], [0] * 7 + [1, 2]),
        ({}, [1] * 4 + [0] * 4 + [1] * 4, [0] * 7 + [1, 2, 3, 4, 5]),
        ({}, [1] * 9, [0] * 9),
        # Iterations that began before λ are not compared.
        ({"max_staleness": 2}, [1] * 4 + [0] * 6, [0] * 9 + [1]),
        # The first iteration is not among the last four without λ.
        ({"hindsight_start_iteration": 5}, [1] + [0] * 8, [0] * 9),
        ({"hindsight_start_iteration": 2}, [1] * 2 + [0] * 4, [0] * 5 + [1]),
        ({"hindsight_start_iteration": 1}, [1] + [0] * 4, [0] * 5),  # one iteration without λ is too few
        # Without λ or without all groups, nothing is compared.
        ({"hindsight_coeff": 0.0}, [1] * 3, [-1] * 3),
        ({"drop_zero_variance_groups": True}, [1] * 3, [-1] * 3),
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
