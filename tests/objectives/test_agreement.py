"""Whether hindsight's log-ratios order a group's turns as their returns do: against plain loops, and at the edges."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trial_ray.objectives.agreement import agreement, ordered_pairs

turns = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.integers(0, 2),
        st.sampled_from([0.0, 0.5, 1.0]),
        st.sampled_from([-1.0, -0.5, 0.25, 0.75, math.nan]),
    ),
    max_size=16,
)


def plain(drawn):
    """Wins and pairs of each group that has pairs, by loops over its turns."""
    found = {}
    for group, position, earned, score in drawn:
        for other, place, less, lower in drawn:
            if (group, position) == (other, place) and earned > less and not math.isnan(score + lower):
                wins, pairs = found.get(group, (0.0, 0))
                found[group] = wins + (score > lower) + 0.5 * (score == lower), pairs + 1
    return [found[group] for group in sorted(found)]


def columns(drawn):
    groups, positions, returns, scores = zip(*drawn, strict=True) if drawn else ((), (), (), ())
    floats = (torch.tensor(each, dtype=torch.float64) for each in (scores, returns))
    return (*floats, *(torch.tensor(each, dtype=torch.long) for each in (groups, positions)))


@given(turns)
def test_it_is_the_share_of_pairs_of_a_position_in_which_the_better_rollout_scores_higher(drawn):
    expected, pairs = plain(drawn), ordered_pairs(*columns(drawn))
    assert pairs.tolist() == [list(each) for each in expected]
    found = agreement(pairs)
    if len(expected) < 2:
        assert found is None
        return
    number = sum(pairs for _, pairs in expected)
    mean = sum(wins for wins, _ in expected) / number
    spread = sum((wins - mean * pairs) ** 2 for wins, pairs in expected) * len(expected) / (len(expected) - 1)
    assert [float(each) for each in found] == pytest.approx([mean, math.sqrt(spread) / number], abs=1e-12)


def test_returns_that_differ_by_rounding_form_no_pair():
    returns = torch.tensor([0.1 + 0.2, 0.3])
    assert len(ordered_pairs(torch.tensor([1.0, 2.0]), returns, torch.tensor([0, 0]), torch.tensor([1, 1]))) == 0


def test_returns_that_are_no_numbers_are_refused():
    with pytest.raises(ValueError, match="returns"):
        ordered_pairs(torch.tensor([1.0]), torch.tensor([math.nan]), torch.tensor([0]), torch.tensor([0]))
