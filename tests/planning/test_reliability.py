"""Losses of nodes and checkpoints, against the closed forms of Young and Daly."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from trial_ray.planning.reliability import Faults, best_interval, simulate_losses, young_daly_s

HOUR = 3600.0
FAULTS = Faults(
    node_mtbf_s=40 * HOUR, learner_nodes=20, engine_nodes=0, checkpoint_s=30, restart_s=60, replacement_s=120
)
ITERATION_S = 20.0


@pytest.mark.parametrize("every", [3, 30, 300])
def test_time_with_losses_is_that_of_dalys_model(every):
    runs = [simulate_losses(FAULTS, ITERATION_S, every, seed) for seed in range(4)]
    segment, mtbf = every * ITERATION_S + FAULTS.checkpoint_s, FAULTS.rollback_mtbf_s
    restart = FAULTS.restart_s + FAULTS.replacement_s
    expected = mtbf * math.exp(restart / mtbf) * (math.exp(segment / mtbf) - 1) / every  # Daly 2006, eq. 20
    assert sum(run.iteration_s for run in runs) / len(runs) == pytest.approx(expected, rel=0.05)


def test_the_best_interval_is_near_youngs():
    best, run = best_interval(FAULTS, ITERATION_S)
    young = young_daly_s(FAULTS)
    assert young == pytest.approx(math.sqrt(2 * 30 * 2 * HOUR))
    assert best * ITERATION_S == pytest.approx(young, rel=0.5)
    for factor in (0.2, 5.0):
        assert simulate_losses(FAULTS, ITERATION_S, round(best * factor)).iteration_s > run.iteration_s


def test_without_losses_only_checkpoints_cost():
    run = simulate_losses(replace(FAULTS, node_mtbf_s=math.inf), ITERATION_S, 10)
    assert run.iteration_s == pytest.approx(ITERATION_S + 3)
    assert (run.losses, run.repeated_s, run.waiting_s) == (0, 0, 0)


def test_the_same_seed_gives_the_same_losses():
    assert simulate_losses(FAULTS, 20, 10, 3) == simulate_losses(FAULTS, 20, 10, 3)
    assert simulate_losses(FAULTS, 20, 10, 3) != simulate_losses(FAULTS, 20, 10, 4)


def test_the_loss_of_an_engines_node_repeats_nothing():
    run = simulate_losses(replace(FAULTS, learner_nodes=0, engine_nodes=20), ITERATION_S, 10)
    assert run.losses > 100
    assert run.repeated_s == 0
    lost = FAULTS.losses_per_s * (FAULTS.restart_s + FAULTS.replacement_s)
    assert run.iteration_s == pytest.approx((ITERATION_S + 3) * (1 + lost), rel=0.05)


def test_an_elastic_run_goes_on_more_slowly_in_place_of_waiting():
    spot = replace(FAULTS, node_mtbf_s=10 * HOUR, learner_nodes=4, engine_nodes=16, replacement_s=600)
    elastic = replace(spot, elastic=True, slower_by_engines=1.1, slower_by_learners=1.3)
    waits, goes_on = simulate_losses(spot, ITERATION_S, 10), simulate_losses(elastic, ITERATION_S, 10)
    assert goes_on.iteration_s < waits.iteration_s
    assert goes_on.waiting_s / goes_on.seconds < 0.5 * waits.waiting_s / waits.seconds
    as_slow = replace(elastic, slower_by_engines=1.0, slower_by_learners=1.0)
    assert simulate_losses(as_slow, ITERATION_S, 10).iteration_s < goes_on.iteration_s


def test_a_run_that_hardly_gets_on_ends_all_the_same():
    hopeless = replace(FAULTS, node_mtbf_s=60, learner_nodes=100)
    run = simulate_losses(hopeless, ITERATION_S, 10)
    assert run.given_up
    assert run.iteration_s == math.inf
