import math

import objective_reference as reference
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trial_ray.objectives.allocation import (
    hindsight_gap,
    permuted_weights,
    relative_weights,
    turn_scores,
    uniform_weights,
)

ONE_TRAJECTORY = torch.zeros(3, dtype=torch.long)


def profile(columns, weigh=relative_weights, scale=1.0, clip=2.0):
    gap = scale * hindsight_gap(columns["teacher"], columns["old"], clip)
    scores, counts = turn_scores(gap, columns["mask"], columns["turn_ids"], columns["num_turns"])
    return scores, counts, weigh(scores, counts, columns["trajectory_ids"])


def token_weighted_means(weights, counts, trajectory_ids):
    for trajectory in trajectory_ids.unique():
        of = trajectory_ids == trajectory
        if counts[of].sum() > 0:
            yield float((counts[of] * weights[of]).sum() / counts[of].sum())


@given(reference.batches)
def test_gap_scores_and_weights_equal_the_loops(batch):
    columns = reference.flat(batch)
    gap = hindsight_gap(columns["teacher"], columns["old"])
    expected_gap = [reference.gap(token.teacher, token.old) for token in reference.tokens_of(batch)]
    assert torch.allclose(gap, torch.tensor(expected_gap, dtype=torch.float64))
    scores, counts, weights = profile(columns)
    rated = [pair for trajectory in batch for pair in reference.scores(trajectory)]
    assert torch.allclose(scores, torch.tensor([s for s, _ in rated], dtype=torch.float64))
    assert counts.tolist() == [n for _, n in rated]
    expected = [w for trajectory in batch for w in reference.weights(trajectory)]
    assert torch.allclose(weights, torch.tensor(expected, dtype=torch.float64))


@given(reference.batches, st.integers(0, 2**32))
def test_token_weighted_mean_is_one_for_every_profile(batch, seed):
    columns = reference.flat(batch)
    for weigh in (
        relative_weights,
        uniform_weights,
        lambda *turns: permuted_weights(*turns, torch.Generator().manual_seed(seed)),
    ):
        _, counts, weights = profile(columns, weigh)
        for mean in token_weighted_means(weights, counts, columns["trajectory_ids"]):
            assert mean == pytest.approx(1, abs=1e-9)
        assert weights[counts == 0].eq(0).all()
        assert weights.ge(0).all()


@given(reference.batches, st.floats(0.01, 100))
def test_profile_ignores_a_common_scale_of_the_gaps(batch, scale):
    columns = reference.flat(batch)
    scores, _, weights = profile(columns)
    # Below this a scale can push a trajectory over the threshold of a numerically zero gap.
    if all(score == 0 or score > 1e-4 for score in scores.tolist()):
        assert torch.allclose(weights, profile(columns, scale=scale)[2], rtol=1e-9)


def test_papers_example():
    weights = relative_weights(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([4, 4, 4]), ONE_TRAJECTORY)
    assert torch.allclose(weights, torch.tensor([0.5, 1.0, 1.5]))


@pytest.mark.parametrize(
    ("scores", "expected"), [([0.0, 0.0], [1, 1]), ([0.0, 1.8e-8], [1, 1]), ([0.0, 2.2e-8], [0, 2])]
)
def test_numerically_zero_gap_weighs_one(scores, expected):
    """The mean score decides: 0.9e-8 is nothing, 1.1e-8 is a profile."""
    scores = torch.tensor([*scores, 0.0, 0.1, 0.3], dtype=torch.float64)
    weights = relative_weights(scores, torch.tensor([3, 3, 0, 5, 5]), torch.tensor([8, 8, 8, 2, 2]))
    assert weights.tolist() == pytest.approx([*expected, 0, 0.5, 1.5]), "nor does it touch another trajectory"


def test_turns_may_come_in_any_order():
    scores, counts = torch.rand(9, dtype=torch.float64), torch.randint(0, 5, (9,))
    trajectory_ids = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2])
    order = torch.tensor([8, 0, 3, 5, 1, 7, 2, 6, 4])
    straight = relative_weights(scores, counts, trajectory_ids)
    assert torch.allclose(relative_weights(scores[order], counts[order], trajectory_ids[order]), straight[order])


def test_ineligible_infinity_does_not_reach_the_score():
    scores, _ = turn_scores(torch.tensor([0.5, math.inf]), torch.tensor([1, 0]), torch.tensor([0, 0]), 1)
    assert scores.tolist() == [0.5]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=24), st.data())
def test_permuted_turn_never_keeps_its_own_weight(trajectories, data):
    """Scores are distinct powers, so a weight tells whose it was; ratios must survive the rescaling."""
    num_turns = len(trajectories)
    counts = torch.tensor(data.draw(st.lists(st.integers(0, 4), min_size=num_turns, max_size=num_turns)))
    scores = 1.3 ** torch.arange(num_turns, dtype=torch.float64)
    ids = torch.tensor(trajectories)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    permuted = permuted_weights(scores, counts, ids, generator)
    own = relative_weights(scores, counts, ids)
    for trajectory in ids.unique():
        active = ((ids == trajectory) & (counts > 0)).nonzero().squeeze(1)
        if len(active) < 2:
            assert permuted[active].tolist() == pytest.approx([1.0] * len(active))
            continue
        # The sorted values differ from those of the relative profile by one common factor: a permutation, rescaled.
        factors = permuted[active].sort().values / own[active].sort().values
        assert torch.allclose(factors, factors[0].expand_as(factors))
        rank_own, rank_permuted = own[active].argsort().argsort(), permuted[active].argsort().argsort()
        assert not (rank_own == rank_permuted).any()


def test_permutation_follows_the_generator_alone():
    scores, counts = torch.rand(12, dtype=torch.float64), torch.ones(12)
    ids = torch.arange(12) // 6
    torch.manual_seed(1)
    first = permuted_weights(scores, counts, ids, torch.Generator().manual_seed(3))
    torch.manual_seed(2)
    assert torch.equal(first, permuted_weights(scores, counts, ids, torch.Generator().manual_seed(3)))
    seen = {tuple(permuted_weights(scores, counts, ids, torch.Generator().manual_seed(i)).tolist()) for i in range(20)}
    assert len(seen) > 15


def test_every_other_turn_is_a_possible_source():
    scores, counts, ids = torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.ones(4), torch.zeros(4).long()
    generator = torch.Generator().manual_seed(0)
    sources = [set() for _ in range(4)]
    for _ in range(100):
        ranks = permuted_weights(scores, counts, ids, generator).argsort().argsort().tolist()
        for turn, source in enumerate(ranks):
            sources[turn].add(source)
    assert sources == [{0, 1, 2, 3} - {turn} for turn in range(4)]


def test_no_turns_at_all():
    empty, ids = torch.zeros(0), torch.zeros(0, dtype=torch.long)
    scores, counts = turn_scores(hindsight_gap(empty, empty), empty, ids, 0)
    assert relative_weights(scores, counts, ids).shape == (0,)
    assert permuted_weights(scores, counts, ids, torch.Generator()).shape == (0,)
