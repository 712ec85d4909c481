"""Speeds that are fitted to a run are those with which it was made; a run folder is read as it was written."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from test_simulation import ARRANGEMENT, LINEAR, RATES, workload

from trial_ray.errors import UserInputError
from trial_ray.metrics import LEARNER
from trial_ray.planning.calibration import EngineSteps, RecordedRun, fit_engine, fit_rates
from trial_ray.planning.simulation import simulate


def recorded(iterations: int = 2, noise: float = 0.0) -> RecordedRun:
    """What a run of known speeds would have recorded; the first iteration took longer."""
    groups = workload(groups=iterations * ARRANGEMENT.tasks)
    run = simulate(groups, ARRANGEMENT, RATES, iterations)
    metrics = [
        {
            "seconds/sampling": each.sampling,
            "seconds/update": each.update,
            "seconds/sync": each.sync,
            "time_this_iter_s": each.seconds,
            f"{LEARNER}scoring/seconds": each.scoring,
            f"{LEARNER}update/seconds": each.update - each.scoring,
            f"{LEARNER}update/tokens_trained": each.tokens,
        }
        for each in run.iterations
    ]
    slow = {**metrics[0], "seconds/sampling": 100.0, f"{LEARNER}scoring/seconds": 50.0}
    random, steps = Random(0), []
    for rows in (1, 2, 4, 8, 16):
        number, prompts = 500 // rows, 40 * random.randint(50, 500)
        total = int(number * rows * random.uniform(1.0, 1.6))
        seconds = number * 0.01 + total * 0.001 + prompts * 0.0001
        steps.append(EngineSteps(number, total, prompts, seconds * (1 + noise * random.uniform(-1, 1))))
    return RecordedRun(groups, ARRANGEMENT, [slow, *metrics], steps, 64, joins_late=False, cached_share=0.0)


def test_the_fitted_speeds_are_those_that_made_the_run():
    rates = fit_rates(recorded())
    assert rates.turn_s == pytest.approx(RATES.turn_s, rel=0.2)
    assert rates.scoring_token_s == pytest.approx(RATES.scoring_token_s, rel=1e-6)
    assert (rates.sync_s, rates.other_s) == pytest.approx((RATES.sync_s, RATES.other_s))
    again = simulate(recorded().workload, ARRANGEMENT, rates, 2)
    before = simulate(recorded().workload, ARRANGEMENT, RATES, 2)
    seconds = [sum(each.seconds for each in run.iterations) for run in (again, before)]
    assert seconds[0] == pytest.approx(seconds[1], rel=0.02)


@pytest.mark.parametrize(("noise", "within"), [(0.0, 1e-6), (0.03, 0.15)])
def test_steps_give_the_engines_curve(noise, within):
    rates = fit_engine(recorded(noise=noise))
    for rows in (1, 8, 64):
        assert rates.step_s(rows) == pytest.approx(LINEAR.step_s(rows), rel=within)


def test_the_share_of_cached_prompts_changes_the_price_of_a_token_and_not_that_of_the_run():
    plain, cached = fit_engine(recorded()), fit_engine(replace(recorded(), cached_share=0.75))
    assert cached.prompt_token_s == pytest.approx(4 * plain.prompt_token_s)
    assert cached.prefill_s(100) == pytest.approx(plain.prefill_s(100))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"arrangement": replace(ARRANGEMENT, max_staleness=1)}, "Name a run with max_staleness=0"),
        ({"steps": ()}, "0 numbers of requests under way"),
        ({"iterations": ()}, "no iteration that trained something"),
    ],
)
def test_a_run_that_does_not_say_enough_is_refused(changes, words):
    with pytest.raises(UserInputError, match=words):
        fit_rates(replace(recorded(), **changes))
