"""Weights in the object store, and their checksums: changes of the policy are detected, changes of the layout are not."""

import pytest
import torch
from fake_engines import digests
from hypothesis import given
from hypothesis import strategies as st

from trial_ray.engines.weights import iter_weights, pack_weights, weights_checksum


def checksum(*tensors):
    return weights_checksum((str(index), tensor) for index, tensor in enumerate(tensors))


A, B = torch.randn(2, 4, 4, generator=torch.Generator())


def test_fusing_reordering_and_padding_keep_the_checksum():
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        a, b = A.to(dtype), B.to(dtype)
        assert checksum(torch.cat([b, a])) == checksum(a, b)
        assert checksum(a.t(), b, torch.zeros(20, 16, dtype=dtype)) == checksum(a, b)


def test_changed_values_change_the_checksum():
    """Changes of signs, changes that leave the sum as it was, and changes of the dtype and of the number of values."""
    for before, after in (
        (torch.tensor([1.0, 2.0, 3.0]), torch.tensor([-1.0, -2.0, 3.0])),
        torch.tensor([[1000, 2000], [1001, 1999]], dtype=torch.int32),
        (A, A.bfloat16()),
        (A, torch.cat([A, A])),
    ):
        assert checksum(before) != checksum(after)


@given(st.integers(0, 99), st.integers(0, 31))
def test_one_flipped_bit_changes_the_checksum(position, bit):
    weight = torch.linspace(-2, 2, 100)
    changed = weight.clone()
    changed.view(torch.int32)[position] ^= torch.tensor(1 << bit).to(torch.int32)
    assert checksum(weight) != checksum(changed)


def test_names_shapes_and_places_change_the_arrangement():
    for before, after in (
        ({"a": A, "b": B}, {"a": B, "b": A}),
        ({"a": A}, {"a": A.t()}),
        ({"a": A, "zero": torch.zeros(3)}, {"a": A}),
        ({"a": torch.zeros(2)}, {"a": torch.zeros(2, dtype=torch.bfloat16)}),
        # Sums of value times place are equal.
        ({"a": torch.tensor([1.0, 2, 2, 1])}, {"a": torch.tensor([2.0, 1, 1, 2])}),
        ({"a": torch.tensor([0.0, 1.0])}, {"a": torch.tensor([1.0, 0.0])}),
    ):
        assert digests(before.items())[1] != digests(after.items())[1]


def test_the_checksum_equals_that_of_earlier_records():
    assert checksum(torch.arange(-3.0, 5.0)) == "b2b85366ed1fd0d6-7"


@pytest.mark.actors
def test_a_sent_version_does_not_change_with_the_learner(ray_session):
    weight = torch.ones(8, dtype=torch.bfloat16)
    shards = pack_weights([("w", weight), ("n", torch.arange(2))], 0)
    weight.fill_(5)
    received = dict(iter_weights(shards))
    assert torch.equal(received["w"], torch.ones(8, dtype=torch.bfloat16))
    assert received["n"].dtype == torch.int64
