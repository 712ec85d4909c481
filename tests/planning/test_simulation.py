"""The simulation against closed forms, its conservation of groups, and what must not make it slower."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest
import simpy

from trial_ray.engines.transformers import MOST_STEPS_WAITED
from trial_ray.errors import ConfigError
from trial_ray.planning.engine_queue import LEFT_BY_URGENT, Cores, SimulatedEngine
from trial_ray.planning.rates import Arrangement, EngineRates, Rates, TurnTokens, Workload, update_seconds
from trial_ray.planning.simulation import Loss, simulate

STEP_S, ROW_S, TOKEN_S = 0.01, 0.001, 0.0001
LINEAR = EngineRates([(1, STEP_S + ROW_S), (64, STEP_S + 64 * ROW_S)], TOKEN_S, 0.0, most_rows=64)
RATES = Rates(LINEAR, turn_s=0.002, scoring_token_s=1e-5, update_token_s=2e-5, step_s=0.01, sync_s=0.05, other_s=0.02)
ARRANGEMENT = Arrangement(
    tasks=6,
    group_size=4,
    max_staleness=0,
    engines=2,
    env_runners=2,
    episodes_in_flight=128,
    learners=1,
    minibatch_rows=40,
)


def workload(seed: int = 0, groups: int = 12, size: int = 4, turns: int = 8) -> Workload:
    random = Random(seed)

    def rollout() -> list[TurnTokens]:
        return [TurnTokens(random.randint(20, 90), random.randint(1, 12)) for _ in range(random.randint(1, turns))]

    return Workload([[rollout() for _ in range(size)] for _ in range(groups)])


def same(turns: int, prompt: int, response: int) -> Workload:
    """One rollout, again and again."""
    return Workload([[[TurnTokens(prompt, response)] * turns]])


def alone(**changes) -> Arrangement:
    """One rollout at a time, on one engine."""
    return replace(ARRANGEMENT, tasks=1, group_size=1, engines=1, env_runners=1, **changes)


# -- cores -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cores", "expected"), [(2, [1.0, 3.0]), (1, [2.0, 4.0]), (math.inf, [1.0, 3.0])])
def test_what_computes_at_once_shares_the_cores(cores, expected):
    env, ends = simpy.Environment(), []
    shared = Cores(env, cores)
    for seconds in (1.0, 3.0):
        shared.compute(seconds, lambda: ends.append(env.now))
    env.run()
    assert ends == pytest.approx(expected)


def test_urgent_work_has_the_cores_first_and_leaves_the_others_a_share():
    env, ends = simpy.Environment(), {}
    shared = Cores(env, 2)
    shared.compute(4.0, lambda: ends.update(urgent=env.now), threads=2, urgent=True)
    shared.compute(1.0, lambda: ends.update(other=env.now))
    env.run()
    assert ends == pytest.approx({"urgent": 4.0, "other": 4.0 + 1.0 - 4.0 * 2 * LEFT_BY_URGENT})


def test_an_urgent_thread_leaves_the_other_core_to_the_others():
    env, ends = simpy.Environment(), {}
    shared = Cores(env, 2)
    shared.compute(4.0, lambda: ends.update(urgent=env.now), urgent=True)
    work = [shared.compute(1.0, lambda: ends.update(other=env.now)) for _ in range(2)]
    env.timeout(1.0).callbacks.append(lambda _: shared.cancel(work[0]))
    env.run()
    assert ends == pytest.approx({"urgent": 4.0, "other": 1.5})


def test_work_that_is_cancelled_leaves_its_cores_to_the_others():
    env, ends = simpy.Environment(), []
    shared = Cores(env, 1)
    shared.compute(1.0, lambda: ends.append(env.now))
    work = shared.compute(5.0, lambda: ends.append("cancelled"))
    env.timeout(1.0).callbacks.append(lambda _: shared.cancel(work))
    env.run()
    assert ends == pytest.approx([1.5])  # half of it in the first second, the rest alone


# -- engines -----------------------------------------------------------------------------------------------------------


def test_a_rollout_alone_takes_the_sum_of_its_parts():
    turns, prompt, response = 3, 50, 7
    [iteration] = simulate(same(turns, prompt, response), alone(), RATES, 1).iterations
    answer = response * (STEP_S + ROW_S) + prompt * TOKEN_S  # the prompt's step samples the first token
    assert iteration.sampling == pytest.approx((turns + 1) * RATES.turn_s + turns * answer)
    scoring, steps = update_seconds(alone(), RATES, turns, turns * (prompt + response))
    assert (iteration.scoring, iteration.update) == pytest.approx((scoring, scoring + steps))
    assert (iteration.sync, iteration.other) == pytest.approx((RATES.sync_s, RATES.other_s))
    assert iteration.engines_busy == pytest.approx(turns * answer / iteration.seconds)
    assert iteration.env_runners_busy == pytest.approx((turns + 1) * RATES.turn_s / iteration.seconds)


def test_requests_at_once_are_decoded_together():
    env = simpy.Environment()
    engine, rows, response = SimulatedEngine(Cores(env), LINEAR), 8, 20
    env.run(env.all_of([engine.ask(10, response) for _ in range(rows)]))
    # The first is alone in its step, in which the others come; it leaves one step before them.
    together = (rows * STEP_S * 0) + (response - 1) * (STEP_S + rows * ROW_S)
    first = STEP_S + ROW_S + 10 * TOKEN_S
    last = STEP_S + (rows - 1) * ROW_S
    joining = (rows - 1) * 10 * TOKEN_S
    assert env.now == pytest.approx(first + joining + together + last)
    assert engine.busy_s == pytest.approx(env.now)


def test_no_more_rows_are_decoded_than_there_is_room_for():
    env = simpy.Environment()
    engine = SimulatedEngine(Cores(env), replace_rates(LINEAR, most_rows=1))
    env.run(env.all_of([engine.ask(0, 5) for _ in range(3)]))
    assert env.now == pytest.approx(15 * (STEP_S + ROW_S))


def replace_rates(rates: EngineRates, **changes) -> EngineRates:
    return replace(rates, **changes)


def test_few_requests_wait_for_more_where_the_engine_says_so():
    def answered_after(joins_late: bool) -> float:
        env = simpy.Environment()
        engine = SimulatedEngine(Cores(env), replace_rates(LINEAR, joins_late=joins_late))
        for _ in range(10):
            engine.ask(0, 100)
        env.run(until=0.5)
        begun = env.now
        env.run(engine.ask(0, 1))
        return env.now - begun

    in_turn, late = answered_after(False), answered_after(True)
    assert in_turn < 3 * (STEP_S + 11 * ROW_S)
    assert late - in_turn == pytest.approx(MOST_STEPS_WAITED * (STEP_S + 11 * ROW_S))


def test_waiting_before_an_engine_is_that_of_an_md1_queue():
    rate, answer_s, number = 7.0, 0.1, 40_000
    env, random, waits = simpy.Environment(), Random(1), []
    engine = SimulatedEngine(Cores(env), EngineRates([(1, answer_s)], 0.0, 0.0, most_rows=1))

    def ask():
        asked = env.now
        yield engine.ask(1, 1)
        waits.append(env.now - asked - answer_s)

    def arrive():
        for _ in range(number):
            yield env.timeout(random.expovariate(rate))
            env.process(ask())

    env.process(arrive())
    env.run()
    load = rate * answer_s
    assert sum(waits) / number == pytest.approx(load * answer_s / (2 * (1 - load)), rel=0.05)  # Pollaczek and Khinchine
    assert engine.busy_s == pytest.approx(number * answer_s)


# -- iterations --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("update_s", [0.3, 30.0])
def test_an_overlapped_iteration_takes_as_long_as_its_longer_part(update_s):
    # An engine that is no faster with many requests.
    rates = Rates(EngineRates([(1, ROW_S), (64, 64 * ROW_S)], TOKEN_S, 0.0, 64), 0.0, 0.0, 0.0, update_s=update_s)
    lengths = same(10, 50, 10)
    arrangement = replace(ARRANGEMENT, engines=1, group_size=1)
    sampling = mean(simulate(lengths, arrangement, rates, 3)).sampling
    overlapped = mean(simulate(lengths, replace(arrangement, max_staleness=1), rates, 60), first=3)
    assert overlapped.seconds == pytest.approx(max(sampling, update_s), rel=0.05)


def mean(run, first: int = 0):
    """The mean seconds of iterations, as an object with the names of one."""
    counted = run.iterations[first:]
    return type("Mean", (), {name: sum(getattr(each, name) for each in counted) / len(counted) for name in NAMES})


NAMES = ("seconds", "sampling", "update", "engines_busy", "env_runners_busy", "staleness")


def test_the_same_seed_gives_the_same_run_and_another_seed_another():
    arrangement = replace(ARRANGEMENT, max_staleness=1, deviation=0.1)
    runs = [simulate(workload(), arrangement, RATES, 4, seed) for seed in (0, 0, 1)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_every_group_that_is_begun_is_trained_or_lost_or_still_in_flight(staleness, seed):
    random, arrangement = Random(seed), replace(ARRANGEMENT, max_staleness=staleness)
    losses = [
        Loss(random.uniform(0, 4), random.choice(["engine", "env runner"]), random.randrange(2), random.uniform(0.1, 1))
        for _ in range(6)
    ]
    run = simulate(workload(seed), arrangement, RATES, 5, seed, losses)
    assert run.groups_started == run.groups_trained + run.groups_lost + run.groups_in_flight
    assert run.groups_trained == 5 * arrangement.tasks == sum(each.groups for each in run.iterations)
    assert all(0 <= each.staleness <= staleness for each in run.iterations)
    shares = [getattr(each, f"{who}_busy") for each in run.iterations for who in ("engines", "learners", "env_runners")]
    assert all(0 <= share <= 1 + 1e-9 for share in shares)


def test_what_a_lost_engine_had_is_asked_of_another_and_a_lost_env_runners_groups_begin_again():
    whole = simulate(workload(), ARRANGEMENT, RATES, 1)
    engine, runner = (
        simulate(workload(), ARRANGEMENT, RATES, 1, losses=[Loss(0.1, kind, 0, 1000.0)])
        for kind in ("engine", "env runner")
    )
    assert (whole.groups_lost, whole.requests_repeated) == (0, 0)
    assert engine.requests_repeated > 0 == engine.groups_lost
    assert runner.groups_lost == 3
    assert min(engine.iterations[0].sampling, runner.iterations[0].sampling) > whole.iterations[0].sampling


def test_sampling_waits_for_the_only_engine_to_come_back():
    [iteration] = simulate(same(2, 10, 5), alone(), RATES, 1, losses=[Loss(0.03, "engine", 0, 9.0)]).iterations
    assert 9.0 < iteration.sampling < 9.3


@pytest.mark.parametrize(
    "better",
    [
        {"engine": LINEAR.times(0.5)},
        {"turn_s": RATES.turn_s / 2},
        {"scoring_token_s": RATES.scoring_token_s / 2},
        {"update_token_s": RATES.update_token_s / 2},
        {"step_s": 0.0},
        {"sync_s": 0.0},
        {"other_s": 0.0},
    ],
)
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_faster_part_makes_no_run_slower(better, staleness):
    arrangement = replace(ARRANGEMENT, max_staleness=staleness)
    before, after = (mean(simulate(workload(), arrangement, rates, 6)) for rates in (RATES, replace(RATES, **better)))
    assert after.seconds < 1.01 * before.seconds


@pytest.mark.parametrize("more", ["engines", "env_runners", "learners"])
def test_more_actors_make_no_run_slower(more):
    rates = replace(RATES, turn_s=0.01)
    seconds = [
        mean(simulate(workload(), replace(ARRANGEMENT, **{more: number}), rates, 4)).seconds for number in (1, 2, 4)
    ]
    assert seconds[2] <= 1.01 * seconds[1] <= 1.02 * seconds[0]
    assert seconds[2] < seconds[0]


def test_stragglers_and_shared_cores_make_a_run_slower():
    even, uneven, crowded = (
        mean(simulate(workload(), replace(ARRANGEMENT, **changes), RATES, 4)).seconds
        for changes in ({}, {"deviation": 0.3}, {"cores": 1})
    )
    assert even < uneven
    assert even < crowded


def test_a_limit_on_rollouts_at_a_time_is_kept():
    free, limited = (
        mean(simulate(workload(), replace(ARRANGEMENT, episodes_in_flight=slots), RATES, 2)) for slots in (128, 1)
    )
    assert limited.seconds > 1.5 * free.seconds
    assert limited.engines_busy > free.engines_busy or limited.env_runners_busy < free.env_runners_busy


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"engines": 0}, "engines=0 found"),
        ({"tasks": 0, "learners": -1}, "tasks=0, learners=-1 found"),
        ({"colocate": True, "max_staleness": 1}, "max_staleness has to be 0"),
    ],
)
def test_an_arrangement_that_could_not_run_is_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        simulate(workload(), replace(ARRANGEMENT, **changes), RATES, 1)


def test_lengths_without_turns_are_refused():
    with pytest.raises(ConfigError, match="without turns"):
        simulate(Workload([[[]]]), ARRANGEMENT, RATES, 1)
