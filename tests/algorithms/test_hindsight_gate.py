"""The gate: λ is 0 while the dense loss does not agree with returns, over ten iterations and across a checkpoint."""

import math

import method_reference as ref
import pytest
import torch
from method_updates import random_update, scored_rows

from trial_ray.algorithms.methods import new_config

COEFFICIENT = 0.1


def gated(gate=0.5):
    config = new_config("trial")
    config.training(hindsight_coeff=COEFFICIENT, hindsight_start_iteration=2, hindsight_gate=gate)
    return config.method_class(config)


def judged(method, iteration, sign=None, confirms=False):
    """Metrics of an update whose gaps have this sign in successes and the other one elsewhere, or are random.

    The mean gap is positive if hindsight confirms.
    """
    update = random_update(iteration)
    rows = scored_rows(update, method.config)
    if sign is not None:
        successes = torch.tensor([1.0 if turn.success else -1.0 for turn in update.turns])[rows.turn_ids]
        gaps = sign * successes
        rows.hindsight_logprobs = rows.logprobs + torch.where((gaps > 0) == confirms, gaps, gaps / 100)
    metrics = method.prepare(rows, update.groups, iteration)
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


def mean_gap(updates):
    """Mean gap and its error by loops over groups."""
    groups = []
    for update in updates:
        of_group = {}
        for turn in update.turns:
            of_group.setdefault(turn.group, []).extend(turn.tokens)
        groups += [
            (sum(max(-2.0, min(2.0, token.teacher - token.old)) for token in tokens), len(tokens))
            for tokens in of_group.values()
            if tokens
        ]
    whole = sum(number for _, number in groups)
    mean = sum(gaps for gaps, _ in groups) / whole
    spread = sum((gaps - mean * number) ** 2 for gaps, number in groups) * len(groups) / (len(groups) - 1)
    return mean, math.sqrt(spread) / whole


def test_the_agreement_is_over_the_groups_of_the_last_ten_iterations():
    method, updates = gated(), []
    for iteration in range(1, 13):
        metrics, _, update = judged(method, iteration)
        updates.append(update)
        found = (metrics["agreement"], metrics["agreement_error"])
        assert found == pytest.approx(looped(updates[-10:]), abs=1e-12)
        found = (metrics["recent_gap"], metrics["recent_gap_error"])
        assert found == pytest.approx(mean_gap(updates[-10:]), abs=1e-12)


def test_the_gate_opens_where_hindsight_agrees_and_closes_where_it_does_not():
    method = gated()
    metrics, coefficient, _ = judged(method, 1, sign=1)
    assert "gate" not in metrics  # λ does not apply yet
    assert coefficient == 0
    for iteration, opened in ((2, 1), (3, 2)):
        metrics, coefficient, _ = judged(method, iteration, sign=1)
        assert (metrics["agreement"], metrics["gate"], coefficient) == (1, opened, COEFFICIENT)
    gates = []
    for iteration in range(4, 14):
        metrics, coefficient, _ = judged(method, iteration, sign=-1)
        assert coefficient == (COEFFICIENT if metrics["agreement"] - metrics["agreement_error"] > 0.5 else 0)
        gates.append(metrics["gate"])
    assert metrics["agreement"] == 0
    closed = gates.index(-1)
    assert gates == [*range(3, 3 + closed), *range(-1, -11 + closed, -1)]
    metrics, coefficient, _ = judged(gated(gate=None), 2, sign=-1)
    assert "gate" not in metrics
    assert coefficient == COEFFICIENT


def test_the_gate_opens_if_hindsight_confirms_the_responses():
    method = gated()
    metrics, coefficient, _ = judged(method, 2, sign=-1, confirms=True)
    assert metrics["recent_gap"] - metrics["recent_gap_error"] > 0
    assert (metrics["agreement"], metrics["gate"], coefficient) == (0, 1, COEFFICIENT)


def test_without_a_group_of_different_returns_it_is_closed():
    method, update = gated(), random_update(0)
    groups = update.groups[2:4]  # all won, none won
    update.groups, update.turns = groups, [turn for turn in update.turns if turn.group in (2, 3)]
    rows = scored_rows(update, method.config)
    metrics = method.prepare(rows, groups, 2)
    assert "agreement" not in metrics
    assert (metrics["gate"], method.dense_coefficient(2)) == (-1, 0)


def test_a_method_that_is_given_the_state_goes_on_alike():
    whole, resumed = gated(), gated()
    for iteration in range(1, 4):
        judged(whole, iteration, sign=1)
    resumed.state = dict(whole.state)
    for iteration in range(4, 8):
        assert judged(whole, iteration, sign=-1)[:2] == judged(resumed, iteration, sign=-1)[:2]


def test_a_run_that_continues_without_a_gate_is_not_held_by_one_that_was_closed():
    closed, resumed = gated(), gated(gate=None)
    judged(closed, 2, sign=-1)
    resumed.state = dict(closed.state)
    assert (closed.dense_coefficient(3), resumed.dense_coefficient(3)) == (0, COEFFICIENT)
