"""How much of the dense loss goes with the returns: against plain loops, and at the edges."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trial_ray.objectives.agreement import agreeing_parts, ratio_of_sums

turns = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.integers(0, 2),
        st.sampled_from([0.0, 0.5, 1.0]),
        st.sampled_from([-1.0, -0.5, 0.0, 0.25, 2.0]),
    ),
    max_size=16,
)


def plain(drawn):
    """Agreeing part and whole of each group that has any, by loops over its turns."""
    found = {}
    for group, position, earned, coefficient in drawn:
        same = [returned for other, place, returned, _ in drawn if (other, place) == (group, position)]
        product = coefficient * (earned - sum(same) / len(same))
        agreeing, whole = found.get(group, (0.0, 0.0))
        found[group] = agreeing + max(product, 0.0), whole + abs(product)
    return [found[group] for group in sorted(found) if found[group][1] > 1e-9]


def columns(drawn):
    groups, positions, returns, coefficients = zip(*drawn, strict=True) if drawn else ((), (), (), ())
    floats = (torch.tensor(each, dtype=torch.float64) for each in (coefficients, returns))
    return (*floats, *(torch.tensor(each, dtype=torch.long) for each in (groups, positions)))


@given(turns)
def test_it_is_the_share_of_the_loss_that_has_the_sign_of_the_return_at_its_position(drawn):
    expected, parts = plain(drawn), agreeing_parts(*columns(drawn))
    assert parts.tolist() == [pytest.approx(each, abs=1e-12) for each in expected]
    found = ratio_of_sums(parts)
    if len(expected) < 2:
        assert found is None
        return
    whole = sum(each for _, each in expected)
    share = sum(agreeing for agreeing, _ in expected) / whole
    spread = sum((agreeing - share * each) ** 2 for agreeing, each in expected) * len(expected) / (len(expected) - 1)
    assert [float(each) for each in found] == pytest.approx([share, math.sqrt(spread) / whole], abs=1e-9)


def test_returns_that_differ_by_rounding_are_equal():
    returns = torch.tensor([0.1 + 0.2, 0.3], dtype=torch.float64)
    assert len(agreeing_parts(torch.tensor([1.0, 2.0]), returns, torch.tensor([0, 0]), torch.tensor([1, 1]))) == 0


def test_returns_that_are_no_numbers_are_refused():
    with pytest.raises(ValueError, match="returns"):
        agreeing_parts(torch.tensor([1.0]), torch.tensor([math.nan]), torch.tensor([0]), torch.tensor([0]))
