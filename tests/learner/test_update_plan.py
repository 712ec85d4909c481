"""The plan of an update, the means over its microbatches, and weights of rows that masked rows beside them do not change."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trial_ray import GRPOConfig, Method, TRIALConfig
from trial_ray.learner.loss import WeightedMeans, means, microbatch_loss
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
        "prompt_style": st.sampled_from(["tagged", "conversation"]),
        "shuffle": st.booleans(),
        "seed": st.none() | st.integers(0, 9),
    }
)


DEFAULTS = vars(GRPOConfig())


def plan_of(lengths, iteration=1, **options):
    return plan_update(lengths, SimpleNamespace(**DEFAULTS | options), iteration)


def pieces_of(plan):
    """Return the rows of each microbatch of each minibatch."""
    return [[microbatch.rows.tolist() for microbatch in minibatch] for minibatch in plan.steps]


def numbers_of(plan):
    """Return the rows of each minibatch."""
    return [[*itertools.chain(*pieces)] for pieces in pieces_of(plan)]


@given(trajectories, settings, st.integers(1, 9), st.integers(2, 9))
def test_every_row_is_scored_once_and_trained_once_an_epoch(lengths, options, iteration, num_learners):
    """Learners score whole trajectories; microbatches, as even as rows allow, do not depend on the number of learners."""
    plan, alone = (plan_of(lengths, iteration, num_learners=number, **options) for number in (num_learners, 0))
    minibatches = numbers_of(plan)
    trajectory = np.repeat(np.arange(len(lengths)), [*map(len, lengths)])
    all_rows = [*range(len(trajectory))]
    trained = np.array([*itertools.chain(*minibatches)], int)
    for epoch in trained.reshape(options["num_epochs"], len(all_rows)):
        assert sorted(epoch) == all_rows
    assert sorted(np.concatenate(plan.scoring)) == all_rows
    owners = {(trajectory[row], learner) for learner, rows in enumerate(plan.scoring) for row in rows}
    assert len(owners) == len(lengths)
    sizes = [*map(len, minibatches)]
    members = [{*trajectory[rows]} for rows in minibatches]
    if options["prompt_style"] == "conversation":
        assert sum(map(len, members)) == len(lengths) * options["num_epochs"]
        assert all(
            size <= options["minibatch_rows"] or len(part) == 1 for size, part in zip(sizes, members, strict=True)
        )
    else:
        assert not sizes or max(sizes) <= min(options["minibatch_rows"], min(sizes) + 1)
    assert pieces_of(plan) == pieces_of(alone)
    for minibatch in plan.steps:
        pieces = [len(microbatch.rows) for microbatch in minibatch]
        assert max(pieces) <= min(options["microbatch_rows"], min(pieces) + 1)
        assert [microbatch.weight for microbatch in minibatch] == pytest.approx([n / sum(pieces) for n in pieces])


def test_a_minibatch_has_a_slice_of_every_shard():
    """As with the published ranks: 32 of the 128 rows of each of 8 shards, which are the microbatches."""
    plan = plan_of([[100] * 16] * 64, minibatch_rows=256, microbatch_rows=32)
    expected = np.arange(1024).reshape(8, 4, 32).swapaxes(0, 1).tolist()
    assert pieces_of(plan) == expected


@given(st.lists(st.lists(st.integers(1, 900), min_size=1, max_size=5), min_size=1, max_size=9), st.integers(1, 5))
def test_the_most_loaded_learner_has_nearly_the_minimum_load(lengths, num_learners):
    tokens = [length for turns in lengths for length in turns]
    rows = min(len(tokens), 9)
    plan = plan_of(lengths, minibatch_rows=rows, microbatch_rows=1, num_learners=num_learners)
    for minibatch in plan.steps:
        learners = [microbatch.learner for microbatch in minibatch]
        costs = [tokens[microbatch.rows[0]] for microbatch in minibatch]
        assert learners == sorted(learners)
        ends = np.cumsum([0, *costs])
        cuts = [*itertools.combinations_with_replacement(range(len(ends)), num_learners - 1)]
        loads = np.diff(ends[np.array(cuts, int)], prepend=0, append=ends[-1])
        assert max(np.bincount(learners, costs)) <= 1.15 * loads.max(1).min()


@pytest.mark.parametrize("num_learners", [3, 8])
def test_a_learner_trains_about_the_rows_that_it_scores(num_learners):
    rng = np.random.default_rng(0)
    lengths = [rng.integers(300, 700, rng.integers(10, 30)).tolist() for _ in range(512)]
    plan = plan_of(lengths, minibatch_rows=256, microbatch_rows=32, num_learners=num_learners)
    for learner, scored in enumerate(plan.scoring):
        trained = [each.rows for minibatch in plan.steps for each in minibatch if each.learner == learner]
        assert len(np.union1d(scored, np.concatenate(trained))) < 1.1 * len(scored)


def test_equal_weighting_is_the_published_rule():
    plan = plan_of([[1] * 45], minibatch_rows=64, microbatch_rows=32, microbatch_weighting="equal")
    assert [(microbatch.weight, len(microbatch.rows)) for microbatch in plan.steps[0]] == [(0.5, 23), (0.5, 22)]


def test_shuffling_follows_its_seed_and_changes_with_the_epoch():
    def cuts(seed):
        plan = plan_of([[1] * 40], minibatch_rows=20, microbatch_rows=20, num_epochs=2, shuffle=True, seed=seed)
        return numbers_of(plan)

    first, again, other = map(cuts, (0, 0, 1))
    assert first == again != other
    assert first[:2] != first[2:]
    assert first[0] != [*range(20)]


def test_means_of_learners_with_unequal_shares():
    """A weight of 0 does not count, and the sums start again after each call of ``pop``."""
    first, idle, last = learners = [WeightedMeans() for _ in range(3)]
    for weight, value, learner in ((0.5, 1.0, first), (0.3, 2.0, last), (0.2, 10.0, last), (0.0, math.nan, idle)):
        learner.add({"grpo/kl": torch.tensor(value)}, weight)
    assert means(learner.pop() for learner in learners) == {"grpo/kl": pytest.approx(0.5 + 0.6 + 2.0)}
    assert means(learner.pop() for learner in learners) == {}


# --- the loss of microbatches

CONFIGS = {
    mean: GRPOConfig().training(surrogate_mean=mean, ref_kl_coeff=0.1, entropy_coeff=0.1) for mean in SURROGATE_MEANS
}


def rows_of(lengths, mask, advantages, importance):
    """Return rows whose tokens have random log-probabilities; a row is masked and weighted as a whole."""
    turns = [Turn(response_ids=np.zeros(length)) for length in lengths]
    rows = TurnRows(turns, torch.arange(len(turns)), torch.tensor(advantages, dtype=torch.float64))
    generator = torch.Generator().manual_seed(len(turns))
    rows.logprobs, rows.reference_logprobs = -torch.rand(2, sum(lengths), generator=generator, dtype=torch.float64)
    rows.mask = torch.tensor(mask)[rows.turn_ids]
    rows.importance_weights = torch.tensor(importance, dtype=torch.float64)[rows.turn_ids]
    return rows


def row_gradients(rows, mean, microbatch_rows, num_learners=1):
    """Return the gradient of a step's loss with respect to each row's log-probabilities and entropies, summed over tokens."""
    config = CONFIGS[mean]
    plan = plan_of(
        [[1]] * len(rows), minibatch_rows=len(rows), microbatch_rows=microbatch_rows, num_learners=num_learners
    )
    logprobs = (0.9 * rows.logprobs).requires_grad_()
    outputs = {"logprobs": logprobs, "entropy": torch.ones_like(logprobs, requires_grad=True)}
    total = 0.0
    for microbatch in plan.weighted_by((rows.num_eligible() > 0).astype(int)).steps[0]:
        part = {name: value[rows.token_positions(microbatch.rows)] for name, value in outputs.items()}
        tokens = TokenBatch.from_rows(rows, microbatch.rows, "cpu")
        total += microbatch.weight * microbatch_loss(Method(config), tokens, part, 1)[0]
    zeros = torch.zeros(len(rows)).double()
    token_gradients = torch.autograd.grad(total, [*outputs.values()])
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
    cut = row_gradients(rows, mean, microbatch_rows, num_learners)
    for name in range(2 if mean == "tokens" else 1):
        assert cut[name] == pytest.approx(whole[name], rel=1e-12, abs=1e-14)


def test_clip_fraction_is_of_eligible_tokens_outside_the_bounds():
    rows = rows_of([1] * 6, [True] * 5 + [False], [0.0] * 6, [1.0] * 6)
    config = GRPOConfig().training(clip_low=0.2, clip_high=0.5)
    ratios = torch.tensor([0.7, 1.0, 1.3, 1.3, 1.6, 9.0], dtype=torch.float64)
    outputs = {"logprobs": rows.logprobs + ratios.log(), "entropy": ratios}
    _, metrics = microbatch_loss(Method(config), TokenBatch.from_rows(rows, range(6), "cpu"), outputs, 1)
    assert metrics["grpo/clip_fraction"].item() == pytest.approx(2 / 5)


@pytest.mark.parametrize("alpha", [float("inf"), 1e-3])
def test_gradient_ratio_is_that_of_gradients_with_respect_to_logits(alpha):
    """Each token's gradient is estimated to a factor of √2, so the ratio is, too; a saturated dense term has no gradient."""
    logits = (3 * torch.randn(40, 6)).double().requires_grad_()
    logprobs = logits.log_softmax(-1)[:, 0]
    advantages, gap = torch.randn(2, 40).double()
    mask, ids = torch.rand(40) < 0.7, torch.zeros(40).long()
    old = logprobs.detach()
    tokens = TokenBatch(old, advantages, mask, ids, ids[:1], hindsight_logprobs=old + gap, weights=torch.ones_like(old))
    config = TRIALConfig().training(hindsight_coeff=0.3, clamp_alpha=alpha, ref_kl_coeff=0.0, entropy_coeff=0.0)
    method = config.method_class(config)
    outputs = {"logprobs": logprobs, "entropy": torch.zeros_like(old)}
    total, metrics = microbatch_loss(method, tokens, outputs, 1)
    sums = WeightedMeans()
    sums.add(metrics, 5.0)
    ratio = means([sums.pop()])["trial/gradient_ratio"]
    (whole,) = torch.autograd.grad(total, logits, retain_graph=True)
    (outcome,) = torch.autograd.grad(metrics["grpo/surrogate_loss"], logits)
    expected = ((whole - outcome).norm() / outcome.norm()).item()
    assert (expected > 0) == (alpha > 1)
    assert expected / 2**0.5 <= ratio <= expected * 2**0.5
