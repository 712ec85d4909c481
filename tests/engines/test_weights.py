"""The weights checksum: what engines do to a layout leaves it alone, what changes the policy does not."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trial_ray.engines.weights import _CHUNK_ELEMENTS, DeviceWeights, WeightsChecksum, pack_weights, weights_checksum


def named(*tensors):
    return [(f"t{index}", tensor) for index, tensor in enumerate(tensors)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_fusing_and_reordering_tensors_leaves_the_checksum(dtype):
    torch.manual_seed(0)
    q, k, v = (torch.randn(rows, 8).to(dtype) for rows in (8, 4, 4))
    assert weights_checksum(named(q, k, v)) == weights_checksum(named(torch.cat([v, q, k])))


def test_rows_of_zeros_that_pad_a_vocabulary_leave_the_checksum():
    embedding = torch.randn(300, 16)
    padded = torch.cat([embedding, torch.zeros(20, 16)])
    assert weights_checksum(named(embedding)) == weights_checksum(named(padded))


def test_memory_layout_does_not_matter():
    weight = torch.randn(6, 10)
    assert weights_checksum(named(weight.t())) == weights_checksum(named(weight))


@given(st.integers(0, 99), st.integers(0, 31))
def test_one_flipped_bit_is_seen(position, bit):
    torch.manual_seed(1)
    weight = torch.randn(100)
    changed = weight.clone()
    changed.view(torch.int32)[position] ^= torch.tensor(1 << bit, dtype=torch.int64).to(torch.int32)
    assert weights_checksum(named(weight)) != weights_checksum(named(changed))


def test_changes_that_cancel_in_a_plain_sum_are_seen():
    bits = torch.tensor([1000, 2000, 3000], dtype=torch.int32)
    moved = torch.tensor([1001, 1999, 3000], dtype=torch.int32)
    assert weights_checksum(named(bits.view(torch.float32))) != weights_checksum(named(moved.view(torch.float32)))


def test_sign_flips_of_two_weights_are_seen():
    weight = torch.tensor([1.0, 2.0, 3.0])
    assert weights_checksum(named(weight)) != weights_checksum(named(torch.tensor([-1.0, -2.0, 3.0])))


def test_a_tensor_sent_twice_or_not_at_all_is_seen():
    tied, other = torch.randn(5, 5), torch.randn(3)
    once = weights_checksum(named(tied, other))
    assert weights_checksum(named(tied, other, tied)) != once
    assert weights_checksum(named(tied)) != once


def test_another_dtype_is_seen():
    weight = torch.tensor([1.0, -0.5])
    assert weights_checksum(named(weight)) != weights_checksum(named(weight.bfloat16()))


def arrangement(**tensors):
    found = WeightsChecksum()
    for name, tensor in tensors.items():
        found.add(name, tensor)
    return found.arrangement


A, B = torch.randn(4, 4), torch.randn(4, 4)
PATTERN = torch.tensor([1.0, 2.0, 2.0, 1.0])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"a": A, "b": B}, {"a": B, "b": A}),
        ({"a": A}, {"a": A.t()}),
        ({"a": A}, {"a": A.reshape(2, 8)}),
        ({"a": A}, {"b": A}),
        ({"a": A, "zero": torch.zeros(3)}, {"a": A}),
        ({"a": torch.zeros(2)}, {"a": torch.zeros(2, dtype=torch.bfloat16)}),
        ({"a": PATTERN}, {"a": torch.tensor([2.0, 1.0, 1.0, 2.0])}),  # equal sums of value times place
        ({"a": torch.tensor([0.0, 1.0])}, {"a": torch.tensor([1.0, 0.0])}),
    ],
)
def test_names_shapes_and_places_are_in_the_arrangement(before, after):
    assert arrangement(**before) != arrangement(**after)


def test_the_arrangement_depends_on_neither_order_nor_memory_nor_chunks_swapped():
    assert arrangement(a=A, b=B) == arrangement(b=B, a=A)
    assert arrangement(a=A.t()) == arrangement(a=A.t().contiguous())
    long = torch.randn(_CHUNK_ELEMENTS * 2 + 5)
    swapped = torch.cat([long[_CHUNK_ELEMENTS : 2 * _CHUNK_ELEMENTS], long[:_CHUNK_ELEMENTS], long[-5:]])
    assert weights_checksum([("a", long)]) == weights_checksum([("a", swapped)])
    assert arrangement(a=long) != arrangement(a=swapped)


def test_the_checksum_is_the_one_of_earlier_records():
    values = torch.arange(-3, 5, dtype=torch.float32)
    assert weights_checksum([("a", values)]) == "b2b85366ed1fd0d6-7"


@pytest.mark.parametrize(
    ("tensors", "version", "message"),
    [
        ([("a", torch.ones(1))], 3.5, "3.5 found"),
        ([("a", torch.ones(1))], True, "True found"),
        ([("a", torch.ones(1))], "4", "'4' found"),
        ([], 0, "none found"),
        ([("a", torch.ones(1)), ("a", torch.ones(1))], 0, "'a' comes twice"),
        ([("a", torch.ones(1))], -1, "-1 found"),
    ],
)
def test_pack_weights_refuses_what_no_engine_could_load(tensors, version, message):
    with pytest.raises(ValueError, match=message):
        pack_weights(tensors, version)


def test_weights_on_a_device_need_a_version_too():
    with pytest.raises(ValueError, match=r"3\.5 found"):
        DeviceWeights(3.5, "c", "a", "ipc", {})
