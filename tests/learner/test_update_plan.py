"""The plan of an update, the means over its microbatches, and weights of rows that masked rows beside them do not change."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trial_ray.algorithms import GRPOConfig, TRIALConfig
from trial_ray.learner.loss import WeightedMeans, means, microbatch_loss
from trial_ray.learner.method import Method
from trial_ray.learner.rows import TokenBatch, TurnRows
from trial_ray.learner.update_plan import plan_update
from trial_ray.objectives import SURROGATE_MEANS
from trial_ray.trajectory import Turn

trajectories = st.lists(st.lists(st.integers(1, 900), min_size=1, max_size=12), max_size=20)
settings = st.fixed_dictionaries(
    {
        "minibatch_rows": st.integers(8, 64),
        "microbatch_rows": st.integers(1, 8),
        "batch_shards": st.integers(1, 9),
        "num_epochs": st.integers(1, 2),
        "whole_trajectories": st.booleans(),
        "shuffle_seed": st.none() | st.tuples(st.integers(0, 9), st.integers(1, 9)),
    }
)


def numbers_of(minibatch) -> list[int]:
    return [row for microbatch in minibatch for row in microbatch.rows.tolist()]


@given(trajectories, settings, st.integers(2, 9))
def test_every_row_is_scored_once_and_trained_once_an_epoch(lengths, options, num_learners):
    """Learners score whole trajectories; microbatches, as even as rows allow, do not depend on the number of learners."""
    plan, alone = (plan_update(lengths, num_learners=number, **options) for number in (num_learners, 1))
    trained = np.array([row for minibatch in plan.steps for row in numbers_of(minibatch)], int)
    num_rows = sum(map(len, lengths))
    for epoch in trained.reshape(options["num_epochs"], num_rows):
        assert sorted(epoch) == list(range(num_rows))
    owner = {row: learner for learner, rows in enumerate(plan.scoring) for row in rows}
    assert sorted(owner) == sorted(row for rows in plan.scoring for row in rows) == list(range(num_rows))
    for start, turns in zip(np.cumsum([0, *map(len, lengths)]), lengths, strict=False):
        assert len({owner[start + turn] for turn in range(len(turns))}) == 1
    sizes = [len(numbers_of(minibatch)) for minibatch in plan.steps]
    trajectory = np.repeat(np.arange(len(lengths)), list(map(len, lengths)))
    members = [set(trajectory[numbers_of(minibatch)].tolist()) for minibatch in plan.steps]
    if options["whole_trajectories"]:
        assert sum(map(len, members)) == len(lengths) * options["num_epochs"]
        assert all(
            size <= options["minibatch_rows"] or len(part) == 1 for size, part in zip(sizes, members, strict=True)
        )
    else:
        assert not sizes or (max(sizes) <= options["minibatch_rows"] and max(sizes) - min(sizes) <= 1)
    for minibatch, expected in zip(plan.steps, alone.steps, strict=True):
        pieces = [len(microbatch.rows) for microbatch in minibatch]
        assert max(pieces) <= min(pieces) + 1
        assert max(pieces) <= options["microbatch_rows"]
        assert [microbatch.weight for microbatch in minibatch] == pytest.approx([n / sum(pieces) for n in pieces])
        assert [each.rows.tolist() for each in minibatch] == [each.rows.tolist() for each in expected]


def test_a_minibatch_has_a_slice_of_every_shard():
    """As with the published ranks: 32 of the 128 rows of each of 8 shards, which are the microbatches."""
    plan = plan_update([[100] * 16] * 64, minibatch_rows=256, microbatch_rows=32)
    expected = np.arange(1024).reshape(8, 4, 32).swapaxes(0, 1).tolist()
    assert [[microbatch.rows.tolist() for microbatch in minibatch] for minibatch in plan.steps] == expected


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


@pytest.mark.parametrize("num_learners", [3, 8])
def test_a_learner_trains_about_the_rows_that_it_scores(num_learners):
    rng = np.random.default_rng(0)
    lengths = [rng.integers(300, 700, rng.integers(10, 30)).tolist() for _ in range(512)]
    plan = plan_update(lengths, minibatch_rows=256, microbatch_rows=32, num_learners=num_learners)
    for learner, scored in enumerate(plan.scoring):
        trained = [each.rows for minibatch in plan.steps for each in minibatch if each.learner == learner]
        assert len(np.union1d(scored, np.concatenate(trained))) < 1.1 * len(scored)


def test_equal_weighting_is_the_published_rule():
    plan = plan_update([[1] * 45], minibatch_rows=64, microbatch_rows=32, weighting="equal")
    assert [(microbatch.weight, len(microbatch.rows)) for microbatch in plan.steps[0]] == [(0.5, 23), (0.5, 22)]


def test_shuffling_follows_its_seed_and_changes_with_the_epoch():
    plans = [
        plan_update([[1] * 40], minibatch_rows=20, microbatch_rows=20, num_epochs=2, shuffle_seed=(seed, 1))
        for seed in (0, 0, 1)
    ]
    cuts = [[numbers_of(minibatch) for minibatch in plan.steps] for plan in plans]
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


# --- the loss of microbatches

CONFIGS = {
    mean: GRPOConfig().training(surrogate_mean=mean, ref_kl_coeff=0.1, entropy_coeff=0.1) for mean in SURROGATE_MEANS
}


def rows_of(lengths: list[int], mask: list[bool], advantages: list[float], importance: list[float]) -> TurnRows:
    """Return rows whose tokens have random log-probabilities; a row is masked and weighted as a whole."""
    turns = [Turn(response_ids=np.zeros(length, np.int32)) for length in lengths]
    rows = TurnRows(turns, torch.arange(len(turns)), torch.tensor(advantages, dtype=torch.float64))
    generator = torch.Generator().manual_seed(len(turns))
    rows.logprobs, rows.reference_logprobs = -torch.rand(2, sum(lengths), generator=generator, dtype=torch.float64)
    rows.mask = torch.tensor(mask)[rows.turn_ids]
    rows.importance_weights = torch.tensor(importance, dtype=torch.float64)[rows.turn_ids]
    return rows


def row_gradients(rows: TurnRows, mean: str, microbatch_rows: int, num_learners: int = 1) -> list[list[float]]:
    """Return the gradient of a step's loss with respect to each row's log-probabilities and entropies, summed over tokens."""
    config = CONFIGS[mean]
    sizes = {"minibatch_rows": len(rows), "microbatch_rows": microbatch_rows, "batch_shards": 1}
    plan = plan_update([[1]] * len(rows), num_learners=num_learners, **sizes)
    outputs = {"logprobs": 0.9 * rows.logprobs, "entropy": torch.ones_like(rows.logprobs)}
    outputs = {name: value.requires_grad_() for name, value in outputs.items()}
    total = torch.zeros((), dtype=torch.float64)
    for microbatch in plan.weighted_by((rows.num_eligible() > 0).astype(int)).steps[0]:
        part = {name: value[rows.token_positions(microbatch.rows)] for name, value in outputs.items()}
        tokens = TokenBatch.from_rows(rows, microbatch.rows, "cpu")
        total = total + microbatch.weight * microbatch_loss(Method(config), config, tokens, part, 1)[0]
    zeros = torch.zeros(len(rows), dtype=torch.float64)
    token_gradients = torch.autograd.grad(total, list(outputs.values()))
    return [zeros.index_add(0, rows.turn_ids, gradient).tolist() for gradient in token_gradients]


ROW = st.tuples(st.integers(1, 5), st.booleans(), st.floats(-2, 2), st.sampled_from([0.0, 1.0, 1.5]))


@pytest.mark.parametrize("mean", SURROGATE_MEANS)
@given(st.lists(ROW, min_size=1, max_size=24), st.integers(1, 24), st.integers(1, 3))
def test_a_rows_gradient_does_not_depend_on_its_microbatch(mean, drawn, microbatch_rows, num_learners):
    """A token mean weights rows by their length, so all rows have the same length there; KL and entropy are token means."""
    lengths, *columns = map(list, zip(*drawn, strict=True))
    rows = rows_of([3] * len(lengths) if mean == "tokens" else lengths, *columns)
    if mean != "tokens":
        rows.reference_logprobs = None
    whole = row_gradients(rows, mean, len(rows))
    cut = row_gradients(rows, mean, min(microbatch_rows, len(rows)), num_learners)
    for name in range(2 if mean == "tokens" else 1):
        assert cut[name] == pytest.approx(whole[name], rel=1e-12, abs=1e-14)


@pytest.mark.parametrize(("clips", "expected"), [((0.2, 0.5), 2), ((0.5, 0.2), 3)])
def test_clip_fraction_is_of_eligible_tokens_outside_the_bounds(clips, expected):
    rows = rows_of([1] * 6, [True] * 5 + [False], [0.0] * 6, [1.0] * 6)
    config = GRPOConfig().training(clip_low=clips[0], clip_high=clips[1])
    ratios = torch.tensor([0.7, 1.0, 1.3, 1.3, 1.6, 9.0], dtype=torch.float64)
    outputs = {"logprobs": rows.logprobs + ratios.log(), "entropy": ratios}
    _, metrics = microbatch_loss(Method(config), config, TokenBatch.from_rows(rows, range(6), "cpu"), outputs, 1)
    assert metrics["grpo/clip_fraction"].item() == pytest.approx(expected / 5)


@pytest.mark.parametrize("alpha", [float("inf"), 1e-3])
def test_gradient_ratio_is_that_of_gradients_with_respect_to_logits(alpha):
    """Each token's gradient is estimated to a factor of √2, so the ratio is, too; a saturated dense term has no gradient."""
    logits = 3 * torch.randn(40, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logprobs = logits.requires_grad_().log_softmax(-1)[:, 0]
    draw = {"generator": torch.Generator().manual_seed(1), "dtype": torch.float64}
    advantages, gap = torch.randn(2, 40, **draw)
    mask, ids = torch.rand(40, **draw) < 0.7, torch.zeros(40, dtype=torch.int64)
    old = logprobs.detach()
    tokens = TokenBatch(old, advantages, mask, ids, ids[:1], hindsight_logprobs=old + gap, weights=torch.ones_like(old))
    config = TRIALConfig().training(hindsight_coeff=0.3, clamp_alpha=alpha, ref_kl_coeff=0.0, entropy_coeff=0.0)
    method = config.method_class(config)
    outputs = {"logprobs": logprobs, "entropy": torch.zeros_like(old)}
    total, metrics = microbatch_loss(method, config, tokens, outputs, 1)
    sums = WeightedMeans()
    sums.add(metrics, 5.0)
    ratio = means([sums.pop()])["trial/gradient_ratio"]
    (whole,) = torch.autograd.grad(total, logits, retain_graph=True)
    (outcome,) = torch.autograd.grad(metrics["grpo/surrogate_loss"], logits)
    expected = ((whole - outcome).norm() / outcome.norm()).item()
    assert (expected > 0) == (alpha > 1)
    assert expected / 2**0.5 <= ratio <= expected * 2**0.5
