"""The plan of an update, and the means over its microbatches."""

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
def test_every_row_is_scored_once_and_trained_once_an_epoch(lengths, options, num_learners):
    """A learner scores whole trajectories."""
    plan, num_rows = plan_update(lengths, num_learners=num_learners, **options), sum(map(len, lengths))
    trained = np.array([row for minibatch in plan.steps for row in rows_of(minibatch)], int)
    for epoch in trained.reshape(options["num_epochs"], num_rows):
        assert sorted(epoch) == list(range(num_rows))
    owner = {row: learner for learner, rows in enumerate(plan.scoring) for row in rows}
    assert sorted(owner) == sorted(row for rows in plan.scoring for row in rows) == list(range(num_rows))
    for start, turns in zip(np.cumsum([0, *map(len, lengths)]), lengths, strict=False):
        assert len({owner[start + turn] for turn in range(len(turns))}) == 1


@given(trajectories, settings, st.integers(2, 9))
def test_microbatches_do_not_depend_on_the_number_of_learners(lengths, options, num_learners):
    one, several = (
        [[(microbatch.rows.tolist(), microbatch.weight) for microbatch in minibatch] for minibatch in plan.steps]
        for plan in (plan_update(lengths, num_learners=number, **options) for number in (1, num_learners))
    )
    assert one == several


@given(trajectories, settings)
def test_sizes_are_as_even_as_whole_rows_allow(lengths, options):
    plan = plan_update(lengths, **options)
    sizes = [len(rows_of(minibatch)) for minibatch in plan.steps]
    assert not sizes or (max(sizes) <= options["minibatch_rows"] and max(sizes) - min(sizes) <= 1)
    for minibatch in plan.steps:
        pieces = [len(microbatch.rows) for microbatch in minibatch]
        assert max(pieces) <= options["microbatch_rows"]
        assert max(pieces) - min(pieces) <= 1
        weights = [microbatch.weight for microbatch in minibatch]
        assert weights == pytest.approx([size / sum(pieces) for size in pieces])


def test_a_minibatch_has_a_slice_of_every_shard():
    """As with the published ranks: 32 of the 128 rows of each of 8 shards, which are the microbatches."""
    plan = plan_update([[100] * 16] * 64, minibatch_rows=256, microbatch_rows=32)
    assert len(plan.steps) == 4
    for step, minibatch in enumerate(plan.steps):
        expected = [list(range(128 * shard + 32 * step, 128 * shard + 32 * step + 32)) for shard in range(8)]
        assert [microbatch.rows.tolist() for microbatch in minibatch] == expected


@given(st.lists(st.lists(st.integers(1, 900), min_size=1, max_size=5), min_size=1, max_size=9), st.integers(1, 5))
def test_the_most_loaded_learner_has_nearly_the_minimum_load(lengths, num_learners):
    tokens = [length for turns in lengths for length in turns]
    rows = min(len(tokens), 9)
    plan = plan_update(lengths, minibatch_rows=rows, microbatch_rows=1, num_learners=num_learners)
    for minibatch in plan.steps:
        learners = [microbatch.learner for microbatch in minibatch]
        costs = [tokens[microbatch.rows[0]] for microbatch in minibatch]
        assert learners == sorted(learners)
        cuts = itertools.combinations_with_replacement(range(len(costs) + 1), num_learners - 1)
        bounds = [[0, *cut, len(costs)] for cut in cuts]
        least = min(max(sum(costs[start:end]) for start, end in itertools.pairwise(cut)) for cut in bounds)
        assert max(np.bincount(learners, costs)) <= 1.15 * least


@pytest.mark.parametrize("num_learners", [2, 3, 4, 8])
def test_a_learner_trains_about_the_rows_that_it_scores(num_learners):
    rng = np.random.default_rng(0)
    lengths = [rng.integers(300, 700, rng.integers(10, 30)).tolist() for _ in range(512)]
    plan = plan_update(lengths, minibatch_rows=256, microbatch_rows=32, num_learners=num_learners)
    for learner, scored in enumerate(plan.scoring):
        microbatches = [microbatch for minibatch in plan.steps for microbatch in minibatch]
        trained = [microbatch.rows for microbatch in microbatches if microbatch.learner == learner]
        assert len(np.union1d(scored, np.concatenate(trained))) < 1.1 * len(scored)


def test_equal_weighting_is_the_published_rule():
    plan = plan_update([[1] * 45], minibatch_rows=64, microbatch_rows=32, weighting="equal")
    assert [(microbatch.weight, len(microbatch.rows)) for microbatch in plan.steps[0]] == [(0.5, 23), (0.5, 22)]


def test_shuffling_follows_its_seed_and_changes_with_the_epoch():
    plans = [
        plan_update([[1] * 40], minibatch_rows=20, microbatch_rows=20, num_epochs=2, shuffle_seed=(seed, 1))
        for seed in (0, 0, 1)
    ]
    cuts = [[rows_of(minibatch) for minibatch in plan.steps] for plan in plans]
    assert cuts[0] == cuts[1] != cuts[2]
    assert cuts[0][:2] != cuts[0][2:]
    assert cuts[0][0] != list(range(20))


def test_means_of_learners_with_unequal_shares():
    """A weight of 0 does not count, and the sums start again after each call of ``pop``."""
    alone, first, idle, last = learners = [WeightedMeans() for _ in range(4)]
    values = [(0.5, 1.0, first), (0.3, 2.0, last), (0.2, 10.0, last), (0.0, 99.0, idle)]
    for weight, value, learner in values:
        for means_of in (alone, learner):
            means_of.add({"grpo/kl": torch.tensor(value, dtype=torch.float64)}, weight)
    expected = {"grpo/kl": pytest.approx(0.5 + 0.6 + 2.0)}
    assert means([alone.pop()]) == means(learner.pop() for learner in (first, idle, last)) == expected
    assert means(learner.pop() for learner in learners) == {}
