"""Group-relative and rescaled advantages at the edges of float arithmetic; ``tests/algorithms`` has the methods' values."""

import math

import method_reference as reference
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trial_ray.objectives import equal_up_to_rounding
from trial_ray.objectives.advantages import group_relative_advantages, penalised_advantages, rescaled_advantages

ONE_GROUP = torch.zeros(8, dtype=torch.long)
groups = st.lists(
    st.lists(st.sampled_from([0.0, 10.0, 0.1, 7.25, -0.1]), min_size=1, max_size=8), min_size=1, max_size=5
)


@given(groups, st.randoms(use_true_random=False))
def test_advantages_equal_the_loop_in_any_order(returns, random):
    rows = [
        (group, *pair)
        for group, values in enumerate(returns)
        for pair in zip(values, reference.relative(values), strict=True)
    ]
    random.shuffle(rows)
    ids, values, expected = map(torch.tensor, zip(*rows, strict=True))
    assert torch.allclose(group_relative_advantages(values.double(), ids * 7 + 3), expected.double(), atol=1e-6)


@pytest.mark.parametrize("scale", [2.0**-30, 1.0, 10.0, 2.0**900])
@pytest.mark.parametrize("returns", [(0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1), (0.7, math.nextafter(0.7, 1))])
def test_returns_that_differ_by_rounding_are_equal(returns, scale):
    returns = scale * torch.tensor(returns, dtype=torch.float64)
    assert returns[0] != returns[1]
    assert group_relative_advantages(returns, ONE_GROUP[:2]).tolist() == [0.0, 0.0]
    result = penalised_advantages(returns, ONE_GROUP[:2], torch.tensor([0.1, 0.0]), torch.tensor([0, 1]))
    assert result.tolist() == pytest.approx([-0.1, 0.0])


@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.float64, 2.0**600), (torch.float64, 2.0**1023), (torch.float32, 2.0**100)]
)
def test_returns_of_any_size_are_compared(dtype, scale):
    """Squares of large returns, and the sum of the largest, are not finite."""
    parts, groups = torch.tensor([1.0, 1.5, -1.0, 0.75, 0.75], dtype=dtype), torch.tensor([0, 0, 0, 1, 1])
    expected = group_relative_advantages(parts, groups, 1e-6 / scale)
    assert expected[:3].abs().min() > 0.3
    assert group_relative_advantages(scale * parts, groups).tolist() == expected.tolist()
    centred = group_relative_advantages(scale * parts, groups, by_deviation=False)
    assert torch.equal(centred, scale * group_relative_advantages(parts, groups, by_deviation=False))
    penalised = penalised_advantages(scale * parts, groups, torch.zeros(5, dtype=dtype), torch.arange(5))
    assert penalised.tolist() == expected.tolist()


@pytest.mark.parametrize("spread", [1e-12, 1e-7, 1e-6, 1e-5, 1e-3, 0.1, 1.0])
def test_nearly_equal_returns_do_not_enlarge_a_penalty(spread):
    returns = 10 * torch.tensor([0.5] * 7 + [0.5 + spread], dtype=torch.float64)
    penalties = torch.tensor([0.1] + [0.0] * 7, dtype=torch.float64)
    penalised = penalised_advantages(returns, ONE_GROUP, penalties, torch.arange(8))
    difference = group_relative_advantages(returns, ONE_GROUP) - penalised
    assert 0 < difference[0] <= 0.1 + 1e-12
    assert not difference[1:].any()


@pytest.mark.parametrize("gap", [math.inf, -math.inf, 500.0, -500.0])
def test_extreme_log_ratios_rescale_up_to_the_clip(gap):
    factor = 1.2 if gap > 0 else 0.8
    result = rescaled_advantages(torch.tensor([0.0, 1.0, -1.0]), torch.full((3,), gap), 1.0)
    assert result.tolist() == pytest.approx([0.0, factor, factor - 2])


@pytest.mark.parametrize("kind", [float, torch.tensor])
@pytest.mark.parametrize(
    ("lowest", "highest", "equal"),
    [
        (0.0, 0.0, True),
        (-1.0, -1.0 + 1e-7, True),
        (1.0, 1.0 + 1e-5, False),
        (-1e-9, 1e-9, False),
        (-1.7e308, 1.7e308, False),
        (5.0, math.inf, False),
        (math.nan, math.nan, False),
    ],
)
def test_equality_up_to_rounding(kind, lowest, highest, equal):
    assert bool(equal_up_to_rounding(kind(lowest), kind(highest))) is equal
