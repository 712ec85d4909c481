"""The agreement over ten iterations; returns that fall after λ begins are noted, and close a gate for good."""

import math

import method_reference as ref
import pytest
from method_updates import random_update, scored_rows
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from trial_ray.algorithms.grpo import GRPO
from trial_ray.algorithms.methods import new_config
from trial_ray.algorithms.methods.trial import TRIAL, TRIALConfig
from trial_ray.errors import ConfigError
from trial_ray.metrics import LEARNER

COEFFICIENT = 0.1


def gated(gate=2):
    config = new_config("trial")
    config.training(hindsight_coeff=COEFFICIENT, hindsight_start_iteration=3, hindsight_gate=gate)
    return config.method_class(config)


def updated(method, iteration, won=None):
    """Metrics and λ of an update, whose rollouts are all won or all lost if ``won`` is given."""
    update = random_update(iteration)
    for group in update.groups if won is not None else ():
        for trajectory in group.trajectories:
            trajectory.success = bool(won)
    metrics = method.prepare(scored_rows(update, method.config), update.groups, iteration)
    return {name: float(value) for name, value in metrics.items()}, method.dense_coefficient(iteration), update


def looped(updates):
    """Agreement and its error by loops over turns at one place, each rollout's last turn left out of the loss."""
    groups = []
    for update in updates:
        rollouts, places = {}, {}
        for turn, weight in zip(update.turns, ref.relative_weights(update.turns), strict=True):
            rollouts.setdefault((turn.group, turn.trajectory), []).append((turn, weight))
        for (group, _), turns in rollouts.items():
            for place, (turn, weight) in enumerate(turns):
                gap = sum(max(-2.0, min(2.0, token.teacher - token.old)) for token in turn.tokens)
                places.setdefault(group, {}).setdefault(place, []).append(
                    (turn.success, weight * gap if place + 1 < len(turns) else 0.0)
                )
        for of_group in places.values():
            products = []
            for found in of_group.values():
                mean = sum(won for won, _ in found) / len(found)
                products += [coefficient * (won - mean) for won, coefficient in found]
            if any(products):
                groups.append((sum(each for each in products if each > 0), sum(map(abs, products))))
    whole = sum(each for _, each in groups)
    share = sum(agreeing for agreeing, _ in groups) / whole
    spread = sum((agreeing - share * each) ** 2 for agreeing, each in groups) * len(groups) / (len(groups) - 1)
    return share, math.sqrt(spread) / whole


def test_the_agreement_is_over_the_groups_of_the_last_ten_iterations():
    method, updates = gated(), []
    for iteration in range(1, 13):
        metrics, _, update = updated(method, iteration)
        updates.append(update)
        found = (metrics["agreement"], metrics["agreement_error"])
        assert found == pytest.approx(looped(updates[-10:]), abs=1e-12)


def course(method, wins, first=1):
    """The gate and whether λ applies, by iteration."""
    found = [updated(method, iteration, each)[:2] for iteration, each in enumerate(wins, first)]
    return [(metrics["returns_fallen"], coefficient > 0) for metrics, coefficient in found]


OPEN = [(0, False), (0, False), (0, True), (0, True)]
"""The third iteration is the first with λ, and is played without it."""


@pytest.mark.parametrize(
    ("wins", "after"),
    [
        ([1, 0, 0, 0, 0, 0, 0], [(0, True)] * 3),  # the first iteration is too long ago
        ([0, 1, 1, 0, 1, 1, 1], [(1, False), (2, False), (3, False)]),  # for good
        ([1, 1, 1, 1, 1, 1, 1], [(0, True)] * 3),
    ],
)
def test_the_gate_closes_for_good_once_returns_have_fallen(wins, after):
    assert course(gated(), wins) == [*OPEN, *after]


def test_without_a_gate_four_iterations_are_compared_and_lambda_stays():
    method = gated(gate=None)
    method.config.hindsight_start_iteration = 4
    found = course(method, [0, 1, 1, 0, 0, 0, 0, 0, 1])
    assert found == [(0, False)] * 3 + [(0, True)] * 4 + [(1, True), (2, True)]
    early = gated(gate=None)
    early.config.hindsight_start_iteration = 1
    assert course(early, [1, 0, 0, 0, 0, 0])[-1] == (0, True), "one iteration without λ is too few"
    method.config.hindsight_coeff = 0.0
    assert "returns_fallen" not in updated(method, 1, True)[0]


def test_iterations_that_were_begun_before_lambda_are_not_compared_with_those_before_it():
    method = gated()
    method.config.max_staleness = 2
    assert course(method, [0, 1, 1, 0, 0, 1, 1, 0])[-4:] == [*[(0, True)] * 3, (1, False)]


def test_a_method_that_is_given_the_state_goes_on_alike():
    whole, resumed = gated(), gated()
    course(whole, [1, 1, 1, 0])
    resumed.state = dict(whole.state)
    rest = course(whole, [1, 1, 1], first=5)
    assert rest == course(resumed, [1, 1, 1], first=5)
    assert rest[0] == (1, False)
    free = gated(gate=None)
    free.state = dict(whole.state)
    assert (whole.dense_coefficient(8), free.dense_coefficient(8)) == (0, COEFFICIENT)
    # A gate that is set after λ has begun has nothing to compare with.
    assert course(gated(), [0, 0, 0], first=5) == [(0, True)] * 3


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"hindsight_start_iteration": 1}, "at least half as many"),
        ({"drop_zero_variance_groups": True}, "leaves some out"),
    ],
)
def test_settings_that_cannot_act_together_are_refused(settings, told):
    with pytest.raises(ConfigError, match=told):
        new_config("gated").training(**settings).check_update()
    method = gated(gate=None)
    method.config.drop_zero_variance_groups = True
    assert "returns_fallen" not in updated(method, 1, True)[0]


@pytest.mark.parametrize("gate", [None, 4])
def test_returns_that_have_fallen_are_a_warning_once(gate, monkeypatch, caplog):
    monkeypatch.setattr(GRPO, "_record_update", lambda *_: None)
    algo = TRIAL.__new__(TRIAL)
    algo._iteration, algo.config = 8, TRIALConfig().training(hindsight_gate=gate, hindsight_start_iteration=5)
    for fallen in (0, 1, 2):
        algo.metrics = MetricsLogger(root=True)
        for name, value in {"returns_fallen": fallen, "return_before": 0.5, "return_recent": 0.25}.items():
            algo.metrics.log_value(tuple(f"{LEARNER}trial/{name}".split("/")), value)
        algo._record_update()
    (message,) = caplog.messages
    assert "iteration 9: with λ the mean return of the last 4 iterations is 0.25, before it was 0.50" in message
    assert ("λ is 0 for the rest" in message) == (gate is not None)
    assert "hindsight_coeff=0 from a checkpoint before iteration 5" in message
