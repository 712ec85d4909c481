"""A prefix tree has every distinct prefix once, each node sees exactly its own prefix, and cuts repeat as little as possible."""

import itertools
import math

import numpy as np
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
    return [ScoredSequence(np.array(row), draw(st.integers(0, len(row) - 1)), draw(temperatures)) for row in ids]


def visible_prefix(pack, node):
    """What a node sees, in the order of positions, as token ids."""
    seen = torch.nonzero(tree_attention.tree_mask(pack.exits)[0, 0, node]).flatten()
    assert pack.position_ids[0, seen].tolist() == list(range(len(seen)))
    return tuple(pack.input_ids[0, seen].tolist())


@given(sequences(), st.integers(1, 30))
def test_each_node_sees_its_prefix_and_predicts_what_follows(sequences, budget):
    packed = pack_trees(PrefixOrder(sequences), budget)
    assert packed.nodes.diff().ge(0).all()
    seen = []
    for pack in packed.packs:  # Each is the tree of its own prefixes: none of them twice.
        size = pack.input_ids.shape[1]
        own = [visible_prefix(pack, node) for node in range(size)]
        assert len({*own}) == size
        assert size <= budget or size == max(map(len, own))
        seen += own
    divisors = torch.ones(len(packed.nodes)) if packed.temperatures is None else packed.temperatures
    pairs = [*zip(packed.nodes.tolist(), packed.targets.tolist(), divisors.tolist(), strict=True)]
    assert len({*pairs}) == len(pairs)
    predicted = [(seen[node], target, divisor) for node, target, divisor in map(pairs.__getitem__, packed.tokens)]
    expected = [
        (tuple(row.ids[:position].tolist()), int(row.ids[position]), row.temperature)
        for row in sequences
        for position in range(len(row.ids) - row.num_targets, len(row.ids))
    ]
    assert predicted == expected
    distinct = {tuple(row.inputs[: length + 1].tolist()) for row in sequences for length in range(len(row.inputs))}
    assert {*seen} == distinct
    assert (packed.num_tokens, packed.num_distinct) == (len(seen), len(distinct))


@given(sequences(), st.integers(1, 25))
def test_no_other_cuts_repeat_less(sequences, budget):
    order = PrefixOrder(sequences)

    def cost(cuts):
        """Nodes of all ranges; infinitely many if a range of several sequences exceeds the budget."""
        total = 0
        for start, stop in itertools.pairwise(cuts):
            size = order.lengths[start:stop].sum() - order.shared[start + 1 : stop].sum()
            total += size if size <= budget or stop - start == 1 else math.inf
        return total

    count = len(sequences)
    inner = [cuts for size in range(count) for cuts in itertools.combinations(range(1, count), size)]
    least = min(cost([0, *cuts, count]) for cuts in inner)
    assert cost([0, *(stop for _, stop in order.cuts(budget))]) == least


def exits_of(cuts, length):
    """Nodes of a tree whose branches, of ``length`` nodes each, grow from these nodes of a common beginning."""
    rows = [np.concatenate((np.arange(cut), np.full(length, 1000 + cut))) for cut in cuts]
    order = PrefixOrder([ScoredSequence(row, 5) for row in rows])
    (pack,) = pack_trees(order, 10_000, multiple_of=tree_attention.SDPA_BLOCK).packs
    return pack.exits


def test_blocks_of_queries_see_what_the_mask_says():
    exits = exits_of((10, 150, 290, 291, 299, 300, 40), 90)
    keys, visible = tree_attention.tree_blocks(exits)
    mask = tree_attention.tree_mask(exits)[0, 0]
    for rows, columns, seen in zip(mask.split(tree_attention.SDPA_BLOCK), keys, visible[:, 0], strict=True):
        counts = torch.zeros_like(rows, dtype=torch.int64).index_add_(1, columns, seen.long())
        assert torch.equal(counts, rows.long())  # each visible key once
    assert keys.shape[1] < len(exits) / 2, "a block must not need the whole pack"


def test_attention_of_segments_equals_attention_with_the_mask(monkeypatch):
    exits = exits_of((3, 5, 10, 15, 20, 25, 28, 30), 40)
    monkeypatch.setattr(tree_attention, "MIN_SEGMENT", 0)
    segments = tree_attention.tree_segments(exits)
    assert {len(ancestors) > 0 for ancestors, *_ in segments} == {True, False}
    # Two query heads share a key head.
    inputs = [torch.randn(1, heads, len(exits), 8).double().requires_grad_() for heads in (4, 2, 2)]
    by_segment = tree_attention._segment_attention(*inputs, None, segments)
    dense = scaled_dot_product_attention(*inputs, tree_attention.tree_mask(exits), enable_gqa=True).transpose(1, 2)
    weights = torch.randn_like(dense)
    ours, theirs = ((output, *torch.autograd.grad(output, inputs, weights)) for output in (by_segment, dense))
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-5)
