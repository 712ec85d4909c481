"""Weights on their way: bit for bit through the object store; the checksum sees what changes the policy, and nothing else."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trial_ray.engines.weights import WeightsChecksum, iter_weights, pack_weights, weights_checksum


def named(*tensors):
    return [(f"t{index}", tensor) for index, tensor in enumerate(tensors)]


A, B = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_fusing_reordering_and_padding_tensors_leaves_the_checksum(dtype):
    a, b = A.to(dtype), B.to(dtype)
    once = weights_checksum(named(a, b))
    assert weights_checksum(named(torch.cat([b, a]))) == once
    assert weights_checksum(named(a.t(), b, torch.zeros(20, 16, dtype=dtype))) == once


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (torch.tensor([1.0, 2.0, 3.0]), torch.tensor([-1.0, -2.0, 3.0])),
        (torch.tensor([1000, 2000], dtype=torch.int32), torch.tensor([1001, 1999], dtype=torch.int32)),
        (A, A.bfloat16()),
        (A, torch.cat([A, A])),
    ],
    ids=["signs", "sum", "dtype", "twice"],
)
def test_changes_that_cancel_in_a_sum_other_dtypes_and_tensors_sent_twice_are_seen(before, after):
    assert weights_checksum(named(before)) != weights_checksum(named(after))


@given(st.integers(0, 99), st.integers(0, 31))
def test_one_flipped_bit_is_seen(position, bit):
    torch.manual_seed(1)
    weight = torch.randn(100)
    changed = weight.clone()
    changed.view(torch.int32)[position] ^= torch.tensor(1 << bit, dtype=torch.int64).to(torch.int32)
    assert weights_checksum(named(weight)) != weights_checksum(named(changed))


def arrangement(**tensors):
    found = WeightsChecksum()
    for name, tensor in tensors.items():
        found.add(name, tensor)
    return found.arrangement


PATTERN = torch.tensor([1.0, 2.0, 2.0, 1.0])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"a": A, "b": B}, {"a": B, "b": A}),
        ({"a": A}, {"a": A.t()}),
        ({"a": A, "zero": torch.zeros(3)}, {"a": A}),
        ({"a": torch.zeros(2)}, {"a": torch.zeros(2, dtype=torch.bfloat16)}),
        ({"a": PATTERN}, {"a": torch.tensor([2.0, 1.0, 1.0, 2.0])}),  # equal sums of value times place
        ({"a": torch.tensor([0.0, 1.0])}, {"a": torch.tensor([1.0, 0.0])}),
    ],
)
def test_names_shapes_and_places_are_in_the_arrangement(before, after):
    assert arrangement(**before) != arrangement(**after)


def test_the_checksum_is_the_one_of_earlier_records():
    values = torch.arange(-3, 5, dtype=torch.float32)
    assert weights_checksum([("a", values)]) == "b2b85366ed1fd0d6-7"


@pytest.mark.actors
def test_later_changes_of_the_learner_do_not_reach_a_version_already_sent(ray_session):
    weight = torch.ones(8, dtype=torch.bfloat16)
    shards = pack_weights([("w", weight), ("n", torch.arange(2))], 0)
    weight.fill_(5)
    received = dict(iter_weights(shards))
    assert torch.equal(received["w"], torch.ones(8, dtype=torch.bfloat16))
    assert received["n"].dtype == torch.int64
