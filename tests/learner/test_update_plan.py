"""The plan of an update: every row once an epoch, the same cuts whoever computes them, and the means over its microbatches."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trial_ray.learner.loss import WeightedMeans, means
from trial_ray.learner.update_plan import plan_update

trajectories = st.lists(st.lists(st.integers(1, 900), min_size=1, max_size=12), max_size=20)
settings = st.fixed_dictionaries(
    {
        "minibatch_rows": st.integers(8, 64),
        "microbatch_rows": st.integers(1, 8),
        "batch_shards": st.integers(1, 9),
        "num_epochs": st.integers(1, 2),
        "shuffle_seed": st.none() | st.tuples(st.integers(0, 9), st.integers(1, 9)),
    }
)


def rows_of(minibatch) -> list[int]:
    return [row for microbatch in minibatch for row in microbatch.rows.tolist()]


@given(trajectories, settings, st.integers(1, 9))
def test_every_row_is_trained_once_an_epoch_and_scored_once_by_whole_trajectories(lengths, options, num_learners):
    plan = plan_update(lengths, num_learners=num_learners, **options)
    num_rows = sum(map(len, lengths))
    trained = [row for minibatch in plan.steps for row in rows_of(minibatch)]
    assert len(trained) == num_rows * options["num_epochs"]
    for epoch in np.split(np.array(trained, int), options["num_epochs"]):
        assert sorted(epoch) == list(range(num_rows))
    assert sorted(row for rows in plan.scoring for row in rows) == list(range(num_rows))
    owner = {row: learner for learner, rows in enumerate(plan.scoring) for row in rows}
    for start, turns in zip(np.cumsum([0, *map(len, lengths)]), lengths, strict=False):
        assert len({owner[start + turn] for turn in range(len(turns))}) == 1


@given(trajectories, settings, st.integers(2, 9))
def test_minibatches_and_microbatches_do_not_depend_on_the_number_of_learners(lengths, options, num_learners):
    one, many = (plan_update(lengths, num_learners=number, **options) for number in (1, num_learners))
    for alone, shared in zip(one.steps, many.steps, strict=True):
        assert [each.rows.tolist() for each in alone] == [each.rows.tolist() for each in shared]
        assert [each.weight for each in alone] == [each.weight for each in shared]


@given(trajectories, settings)
def test_sizes_are_as_even_as_whole_rows_allow(lengths, options):
    plan = plan_update(lengths, **options)
    sizes = [len(rows_of(minibatch)) for minibatch in plan.steps]
    assert not sizes or (max(sizes) <= options["minibatch_rows"] and max(sizes) - min(sizes) <= 1)
    for minibatch in plan.steps:
        pieces = [len(each.rows) for each in minibatch]
        assert max(pieces) <= options["microbatch_rows"]
        assert max(pieces) - min(pieces) <= 1
        assert sum(each.weight for each in minibatch) == pytest.approx(1)
        for each in minibatch:
            assert each.weight == pytest.approx(len(each.rows) / sum(pieces))


def test_a_minibatch_takes_a_slice_of_every_shard_as_the_published_ranks_did():
    # 1,024 rows in 8 shards of 128; minibatches of 256 rows take 32 of each, which are the microbatches.
    plan = plan_update([[100] * 16] * 64, minibatch_rows=256, microbatch_rows=32)
    assert len(plan.steps) == 4
    for step, minibatch in enumerate(plan.steps):
        expected = [list(range(128 * shard + 32 * step, 128 * shard + 32 * step + 32)) for shard in range(8)]
        assert [each.rows.tolist() for each in minibatch] == expected


@given(st.lists(st.lists(st.integers(1, 900), min_size=1, max_size=5), min_size=1, max_size=9), st.integers(1, 5))
def test_no_other_cut_of_a_minibatch_loads_its_most_loaded_learner_much_less(lengths, num_learners):
    tokens = [each for turns in lengths for each in turns]
    rows = min(len(tokens), 9)
    plan = plan_update(lengths, minibatch_rows=rows, microbatch_rows=1, num_learners=num_learners)
    for minibatch in plan.steps:
        learners, costs = [each.learner for each in minibatch], [tokens[each.rows[0]] for each in minibatch]
        assert learners == sorted(learners)
        cuts = itertools.combinations_with_replacement(range(len(costs) + 1), num_learners - 1)
        bounds = [[0, *cut, len(costs)] for cut in cuts]
        least = min(max(sum(costs[start:end]) for start, end in itertools.pairwise(each)) for each in bounds)
        assert max(np.bincount(learners, costs)) <= 1.15 * least


@pytest.mark.parametrize("num_learners", [2, 3, 4, 8])
def test_a_learner_trains_what_it_scores(num_learners):
    rng = np.random.default_rng(0)
    lengths = [rng.integers(300, 700, rng.integers(10, 30)).tolist() for _ in range(512)]
    plan = plan_update(lengths, minibatch_rows=256, microbatch_rows=32, num_learners=num_learners)
    for learner, scored in enumerate(plan.scoring):
        assert len(plan.share(learner)) < 1.1 * len(scored)


def test_equal_weighting_is_the_published_rule():
    plan = plan_update([[1] * 45], minibatch_rows=64, microbatch_rows=32, weighting="equal")
    assert [each.weight for each in plan.steps[0]] == [0.5, 0.5]
    assert [len(each.rows) for each in plan.steps[0]] == [23, 22]


def test_shuffling_follows_its_seed_and_changes_with_the_epoch():
    plans = [
        plan_update([[1] * 40], minibatch_rows=20, microbatch_rows=20, num_epochs=2, shuffle_seed=(seed, 1))
        for seed in (0, 0, 1)
    ]
    cuts = [[rows_of(minibatch) for minibatch in plan.steps] for plan in plans]
    assert cuts[0] == cuts[1] != cuts[2]
    assert cuts[0][:2] != cuts[0][2:]
    assert cuts[0][0] != list(range(20))


def added(values: list[tuple[float, float]]) -> WeightedMeans:
    result = WeightedMeans()
    for weight, value in values:
        result.add({"grpo/kl": torch.tensor(value, dtype=torch.float64)}, weight)
    return result


def test_learners_with_unequal_shares_have_the_mean_of_all():
    values = [(0.5, 1.0), (0.3, 2.0), (0.2, 10.0)]
    alone = means([added(values).take()])
    shared = means([added(values[:1]).take(), added([]).take(), added(values[1:]).take()])
    assert alone == shared == {"grpo/kl": pytest.approx(0.5 + 0.6 + 2.0)}


def test_what_is_added_without_a_weight_does_not_count_and_taking_starts_anew():
    sums = added([(0.0, 99.0), (2.0, 3.0)])
    assert means([sums.take()]) == {"grpo/kl": 3.0}
    assert means([sums.take()]) == {}
