"""A prefix tree has every distinct prefix once, each node sees exactly its own prefix, and cuts repeat as little as possible."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from trial_ray.models import tree_attention
from trial_ray.models.prefix_tree import PrefixOrder, ScoredSequence, pack_trees


@st.composite
def sequences(draw):
    """Ids of few kinds, so that much is shared; some sequences twice, some a prefix of another."""
    ids = draw(st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=9), min_size=1, max_size=12))
    temperatures = st.sampled_from([1.0, 0.7])
    return [
        ScoredSequence(np.array(row, np.int32), draw(st.integers(0, len(row) - 1)), draw(temperatures)) for row in ids
    ]


def prefixes(sequence):
    inputs = sequence.inputs.tolist()
    return [tuple(inputs[: length + 1]) for length in range(len(inputs))]


def visible_prefix(pack, node):
    """What a node sees, in the order of positions, as token ids."""
    seen = torch.nonzero(tree_attention.tree_mask(pack.exits)[0, 0, node]).flatten()
    assert pack.position_ids[0, seen].tolist() == list(range(len(seen)))
    return tuple(pack.input_ids[0, seen].tolist())


@given(sequences(), st.integers(1, 30))
def test_each_node_sees_its_prefix_and_predicts_what_follows(sequences, budget):
    packed = pack_trees(PrefixOrder(sequences), budget)
    assert packed.nodes.tolist() == sorted(packed.nodes.tolist())
    seen = [visible_prefix(pack, node) for pack in packed.packs for node in range(pack.input_ids.shape[1])]
    divisors = torch.ones(len(packed.nodes)) if packed.temperatures is None else packed.temperatures
    pairs = [*zip([seen[node] for node in packed.nodes], packed.targets.tolist(), divisors.tolist(), strict=True)]
    keys = zip(packed.nodes.tolist(), packed.targets.tolist(), divisors.tolist(), strict=True)
    assert len(set(keys)) == len(pairs)
    predicted = [pairs[pair] for pair in packed.tokens.tolist()]
    expected = [
        (tuple(row.ids[:position].tolist()), int(row.ids[position]), row.temperature)
        for row in sequences
        for position in range(len(row.ids) - row.num_targets, len(row.ids))
    ]
    assert predicted == expected
    # Each pack is the tree of its own prefixes: none of them twice.
    sizes = [pack.input_ids.shape[1] for pack in packed.packs]
    ends = np.cumsum(sizes)
    for end, size in zip(ends, sizes, strict=True):
        assert len(set(seen[end - size : end])) == size
        assert size <= budget or size == max(size, *map(len, seen[end - size : end]))
    distinct = {prefix for row in sequences for prefix in prefixes(row)}
    assert set(seen) == distinct
    assert packed.num_tokens == len(seen)
    assert packed.num_distinct == len(distinct)


@given(sequences(), st.integers(1, 25))
def test_no_other_cuts_repeat_less(sequences, budget):
    order = PrefixOrder(sequences)

    def cost(cuts):
        total = 0
        for start, stop in itertools.pairwise(cuts):
            size = int(order.lengths[start:stop].sum() - order.shared[start + 1 : stop].sum())
            if size > budget and stop - start > 1:
                return None
            total += size
        return total

    count = len(sequences)
    inner = [cuts for size in range(count) for cuts in itertools.combinations(range(1, count), size)]
    costs = [cost([0, *cuts, count]) for cuts in inner]
    assert cost([0, *(stop for _, stop in order.cuts(budget))]) == min(total for total in costs if total is not None)


@pytest.fixture(scope="module")
def exits():
    """A tree of several blocks: rows with a common beginning, some of them long."""
    generator = np.random.default_rng(0)
    common = generator.integers(0, 50, 300)
    cuts = [10, 150, 290, 290, 300, 300, 40]
    rows = [np.concatenate((common[:cut], generator.integers(50, 99, 90))) for cut in cuts]
    packed = pack_trees(
        PrefixOrder([ScoredSequence(row, 5) for row in rows]), 10_000, multiple_of=tree_attention.FLEX_BLOCK
    )
    (pack,) = packed.packs
    assert len(pack.exits) % tree_attention.FLEX_BLOCK == 0
    return pack.exits


def test_blocks_of_queries_see_what_the_mask_says(exits):
    keys, visible = tree_attention.tree_blocks(exits)
    expected = tree_attention.tree_mask(exits)[0, 0]
    for block, (columns, seen) in enumerate(zip(keys, visible[:, 0], strict=True)):
        rows = expected[block * tree_attention.SDPA_BLOCK : (block + 1) * tree_attention.SDPA_BLOCK]
        counts = torch.zeros_like(rows, dtype=torch.int64).index_add_(1, columns, seen.long())
        assert torch.equal(counts, rows.long())  # each visible key once
    assert keys.shape[1] < len(exits) / 2, "a block must not need the whole pack"


@given(sequences())
def test_segments_see_their_ancestors_and_their_own_beginning(sequences):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tree_attention, "MIN_SEGMENT", 0)
        for pack in pack_trees(PrefixOrder(sequences), 1000).packs:
            mask = tree_attention.tree_mask(pack.exits)[0, 0]
            if (segments := tree_attention.tree_segments(pack.exits)) is None:
                continue
            assert [start for _, start, _ in segments] == [0, *(end for *_, end in segments[:-1])]
            for ancestors, start, end in segments:
                for node in range(start, end):
                    assert torch.nonzero(mask[node]).flatten().tolist() == [
                        *ancestors.tolist(),
                        *range(start, node + 1),
                    ]


def test_attention_of_segments_equals_attention_with_the_mask(monkeypatch):
    monkeypatch.setattr(tree_attention, "MIN_SEGMENT", 0)
    common, generator = np.arange(30), torch.Generator().manual_seed(0)
    rows = [np.concatenate((common[:cut], np.full(40, 50 + cut))) for cut in (3, 3, 20, 30)]
    (pack,) = pack_trees(PrefixOrder([ScoredSequence(row, 5) for row in rows]), 10_000, multiple_of=64).packs
    segments, length = tree_attention.tree_segments(pack.exits), len(pack.exits)
    assert {len(ancestors) > 0 for ancestors, *_ in segments} == {True, False}
    # Two query heads share a key head.
    inputs = [torch.randn(1, heads, length, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)]
    inputs = [tensor.requires_grad_() for tensor in inputs]
    by_segment = tree_attention._segment_attention(*inputs, None, segments)
    mask = tree_attention.tree_mask(pack.exits)
    dense = scaled_dot_product_attention(*inputs, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    weights = torch.randn(dense.shape, generator=generator, dtype=torch.float64)
    gradients = [torch.autograd.grad((output * weights).sum(), inputs) for output in (by_segment, dense)]
    for one, other in zip((by_segment, *gradients[0]), (dense, *gradients[1]), strict=True):
        assert torch.allclose(one, other, atol=1e-12)
