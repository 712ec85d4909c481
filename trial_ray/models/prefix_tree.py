"""Sequences as prefix trees: every distinct prefix in a forward pass is one node, and is computed once.

Sequences that start alike (the rollouts of a task, a turn with and without teacher context, the turns of a conversation) share
their common prefix. The nodes of a tree are in depth-first order: node n and its descendants are the nodes n..exits[n]-1, and a
node sees its ancestors and itself::

    key visible to query  iff  key <= query < exits[key]

The position id of a node is its depth. A target token is predicted by the node of the token before it; a node with several
children predicts several targets. A tree with too many nodes for a forward pass is cut into packs, one per pass, along the
depth-first order. The prefix that a pack's first sequence shares with the sequence before it is then computed again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ids = NDArray[np.integer]
Ints = NDArray[np.int64]
"""Indices of sequences, rows or nodes."""


@dataclass(frozen=True, slots=True)
class ScoredSequence:
    """Token sequence with scored tokens at its end.

    Attributes:
        ids: token ids, int ``[L]``; at least one token is before the scored tokens.
        num_targets: number of scored tokens at the end.
        temperature: divides the logits of the scored tokens; positive.
    """

    ids: Ids
    num_targets: int
    temperature: float = 1.0

    @property
    def inputs(self) -> Ids:
        """Inputs of the model: all tokens but the last target, which predicts nothing."""
        return self.ids[:-1] if self.num_targets else self.ids


@dataclass(frozen=True, slots=True)
class Pack:
    """Input of one forward pass.

    Attributes:
        input_ids: int64 ``[B, L]``, a tree (with a B of 1) or B rows padded on the right.
        position_ids: int64 ``[1, L]``, the depths of a tree's nodes; ``None`` for padded rows, whose positions start at 0.
        exits: int64 ``[L]``, one past the last descendant of each node of a tree; ``None`` for padded rows.
    """

    input_ids: Tensor
    position_ids: Tensor | None = None
    exits: Tensor | None = None


@dataclass(frozen=True, slots=True)
class PackedSequences:
    """Sequences packed for a model.

    T is the number of targets of all sequences. U is the number of distinct pairs of a predicting node and a target at the same
    temperature.

    Attributes:
        packs: inputs of the forward passes.
        nodes: int64 ``[U]``, index of each pair's node in the concatenated inputs of all packs, ascending.
        targets: int64 ``[U]``, target of each pair.
        temperatures: float64 ``[U]``, divisor of the logits of each pair, or ``None`` if all are 1.
        tokens: int64 ``[T]``, index of each target's pair; targets are in the order of the sequences.
        num_tokens: number of inputs of all packs.
        num_distinct: number of distinct prefixes of the sequences, the minimum number of inputs to compute them.
    """

    packs: tuple[Pack, ...]
    nodes: Tensor
    targets: Tensor
    temperatures: Tensor | None
    tokens: Tensor
    num_tokens: int
    num_distinct: int


class PrefixOrder:
    """Sequences in the depth-first order of their prefix tree.

    Args:
        sequences: N sequences, at least one.

    Attributes:
        order: int64 ``[N]``, indices of the sequences, sorted by their inputs.
        shared: int64 ``[N]``, number of inputs in the common prefix of each sequence and the one before it; 0 for the first.
        lengths: int64 ``[N]``, number of inputs of each sequence, in this order.
    """

    def __init__(self, sequences: Sequence[ScoredSequence]) -> None:
        self.sequences = sequences
        inputs = [sequence.inputs for sequence in sequences]
        # The bytes of big-endian numbers sort in the same order as the numbers, and much faster than lists.
        keys = [ids.astype(">u4").tobytes() for ids in inputs]
        self.order = np.array(sorted(range(len(keys)), key=keys.__getitem__), np.int64)
        self.lengths = np.array([len(inputs[index]) for index in self.order], np.int64)
        pairs = zip(self.order[:-1], self.order[1:], strict=True)
        self.shared = np.array(
            [0, *(common_prefix(inputs[first], inputs[second]) for first, second in pairs)], np.int64
        )

    @cached_property
    def num_distinct(self) -> int:
        """Number of distinct prefixes, which is the number of nodes of the tree before it is cut into packs."""
        return int((self.lengths - self.shared).sum())

    def cuts(self, max_tokens: int) -> list[tuple[int, int]]:
        """Split the order into ranges with trees of at most ``max_tokens`` nodes, with as few repeated nodes as possible.

        The ranges are consecutive. A sequence with more than ``max_tokens`` inputs gets a separate range.
        """
        # The tree of the sequences start..stop-1 has size[start] + grown[stop] nodes; a larger start never adds nodes.
        grown = np.concatenate(([0], np.cumsum(self.lengths - self.shared)))
        size = self.shared - grown[:-1]
        repeated = np.zeros(len(self.order) + 1, np.int64)
        begins = np.zeros(len(self.order) + 1, np.int64)
        first = 0
        for stop in range(1, len(self.order) + 1):
            while first < stop - 1 and size[first] + grown[stop] > max_tokens:
                first += 1
            costs = repeated[first:stop] + self.shared[first:stop]
            begins[stop] = first + int(np.argmin(costs))
            repeated[stop] = costs[begins[stop] - first]
        ranges, stop = [], len(self.order)
        while stop:
            ranges.append((int(begins[stop]), stop))
            stop = int(begins[stop])
        return ranges[::-1]

    def packs(self, max_tokens: int, multiple_of: int) -> Iterator[tuple[slice, int]]:
        """Yield each range of :meth:`cuts`, and its number of nodes, rounded up to a multiple of ``multiple_of``."""
        for start, stop in self.cuts(max_tokens):
            cut = slice(start, stop)
            size = int(self.lengths[cut].sum() - self.shared[cut][1:].sum())
            yield cut, size + -size % multiple_of

    def padded_packs(self, max_tokens: int, *, mixed: bool) -> list[tuple[Ints, int]]:
        """Return packs of sequences of similar length, the longest first: their indices and the length of the padded rows.

        A pack has at most ``max_tokens`` inputs, padding included; a longer sequence gets a separate pack. Without ``mixed``, all
        sequences of a pack have the same length.
        """
        lengths = np.array([len(sequence.inputs) for sequence in self.sequences])
        by_length = np.argsort(-lengths, kind="stable")
        packs, start = [], 0
        while start < len(by_length):
            width = int(lengths[by_length[start]])
            members = by_length[start : start + max(1, max_tokens // width)]
            if not mixed:
                members = members[lengths[members] == width]
            packs.append((members, width))
            start += len(members)
        return packs


def pack_trees(
    order: PrefixOrder, max_tokens: int, device: torch.device | str = "cpu", multiple_of: int = 1
) -> PackedSequences:
    """Pack sequences as prefix trees.

    Args:
        order: the sequences in depth-first order.
        max_tokens: maximum number of nodes in a pack; a longer sequence gets a separate pack.
        device: device of the tensors.
        multiple_of: packs are filled up to a multiple of this number, with nodes that see only themselves and predict nothing.
    """
    packs, nodes = [], [np.empty(0, np.int64)] * len(order.sequences)
    offset = 0
    for cut, num_nodes in order.packs(max_tokens, multiple_of):
        arrays = _tree(order, cut, num_nodes, nodes, offset)
        packs.append(Pack(*(torch.from_numpy(array).to(device) for array in arrays)))
        offset += num_nodes
    return _finish(packs, order, nodes, device)


def pack_padded(order: PrefixOrder, max_tokens: int, device: torch.device | str, *, mixed: bool) -> PackedSequences:
    """Pack sequences as rows padded on the right, with rows of similar length together, for models that do not support trees.

    Padding needs no mask: in a causal model, no real token sees later tokens. Without ``mixed``, all rows of a pack have the
    same length.
    """
    packs, nodes = [], [np.empty(0, np.int64)] * len(order.sequences)
    offset = 0
    for members, width in order.padded_packs(max_tokens, mixed=mixed):
        ids = np.zeros((len(members), width), np.int64)
        for row, index in enumerate(members):
            inputs = order.sequences[index].inputs
            ids[row, : len(inputs)] = inputs
            end = offset + row * width + len(inputs)
            nodes[index] = np.arange(end - order.sequences[index].num_targets, end)
        packs.append(Pack(torch.from_numpy(ids).to(device)))
        offset += ids.size
    return _finish(packs, order, nodes, device)


def _tree(order: PrefixOrder, cut: slice, num_nodes: int, nodes: list[Ints], offset: int) -> tuple[Ints, Ints, Ints]:
    """Build the tree of the sequences of a pack, and write the indices of the nodes that predict targets to ``nodes``.

    Returns:
        Token ids and depths ``[1, L]`` of the nodes, and ``exits`` ``[L]``, as in :class:`Pack`.
    """
    ids, depths = np.zeros((2, num_nodes), np.int64)
    exits = np.arange(num_nodes) + 1
    path = np.empty(int(order.lengths[cut].max()), np.int64)
    size = depth = 0
    for index, common in zip(order.order[cut], [0, *order.shared[cut][1:].tolist()], strict=True):
        sequence = order.sequences[index]
        inputs = sequence.inputs
        exits[path[common:depth]] = size
        depth = len(inputs)
        grown = size + depth - common
        ids[size:grown] = inputs[common:]
        depths[size:grown] = path[common:depth] = np.arange(common, depth)
        path[common:depth] += size - common
        size = grown
        nodes[index] = path[depth - sequence.num_targets : depth] + offset
    exits[path[:depth]] = size
    return ids[None], depths[None], exits


def _finish(
    packs: Sequence[Pack], order: PrefixOrder, nodes: Sequence[Ints], device: torch.device | str
) -> PackedSequences:
    """Build the packed sequences; targets with equal node, token and temperature are computed once."""
    predecessors = np.concatenate(nodes)
    ends = [sequence.ids[len(sequence.ids) - sequence.num_targets :] for sequence in order.sequences]
    targets = np.concatenate(ends).astype(np.int64)
    lengths = [sequence.num_targets for sequence in order.sequences]
    temperatures = np.repeat([sequence.temperature for sequence in order.sequences], lengths).astype(np.float64)
    levels, level = np.unique(temperatures, return_inverse=True)
    # The node is in a key's highest bits, so np.unique() sorts by node.
    keys = (predecessors * len(levels) + level) << 32 | targets
    _, firsts, tokens = np.unique(keys, return_index=True, return_inverse=True)
    return PackedSequences(
        packs=tuple(packs),
        nodes=torch.from_numpy(predecessors[firsts]).to(device),
        targets=torch.from_numpy(targets[firsts]).to(device),
        temperatures=None if (levels == 1).all() else torch.from_numpy(temperatures[firsts]).to(device),
        tokens=torch.from_numpy(tokens.astype(np.int64)).to(device),
        num_tokens=sum(pack.input_ids.numel() for pack in packs),
        num_distinct=order.num_distinct,
    )


def common_prefix(first: Ids, second: Ids) -> int:
    """Return the number of tokens that two sequences have in common at their beginning."""
    length = min(len(first), len(second))
    different = np.flatnonzero(first[:length] != second[:length])
    return int(different[0]) if len(different) else length
