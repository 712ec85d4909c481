"""The weights checksum: what engines do to a layout leaves it alone, what changes the policy does not."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trial_ray.inference.weights import pack_weights, weights_checksum


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


@pytest.mark.parametrize(
    ("tensors", "version", "message"),
    [
        ([], 0, "none found"),
        ([("a", torch.ones(1)), ("a", torch.ones(1))], 0, "'a' comes twice"),
        ([("a", torch.ones(1))], -1, "-1 found"),
    ],
)
def test_pack_weights_refuses_what_no_engine_could_load(tensors, version, message):
    with pytest.raises(ValueError, match=message):
        pack_weights(tensors, version)
