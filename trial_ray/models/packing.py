"""Pack sequences for a model, split them into forward passes, and score them without gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from trial_ray.models.layout import layout_of, pack_rows
from trial_ray.models.logprobs import sequence_logprobs
from trial_ray.models.prefix_tree import Ints, PackedSequences, PrefixOrder, ScoredSequence
from trial_ray.models.tree_attention import accepts_blocks, block_size

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MAX_CPU_TOKENS = 4096
"""Larger packs exceed a CPU's caches: the quickstart's model is a tenth slower with 16,384 tokens."""
_TREE_TOKENS_PER_HIDDEN, _MIN_TREE_TOKENS = 2, 1024
"""Number of nodes, relative to the hidden size and at least, up to which a dense mask is worth its cost. A larger pack repeats
fewer nodes at its cuts and needs fewer calls."""


def pack_sequences(lm: PreTrainedModel, order: PrefixOrder, max_tokens: int) -> PackedSequences:
    """Pack sequences for a model: as prefix trees if it supports them, else as padded rows, of equal length if it requires that.

    Args:
        lm: a transformers causal language model.
        order: prefix order of the sequences.
        max_tokens: maximum number of inputs in a pack.
    """
    rows = layout_of(lm).rows
    return pack_rows(lm, rows, order, _pack_tokens(lm, max_tokens) if rows == "tree" else max_tokens)


def split_into_passes(lm: PreTrainedModel, order: PrefixOrder, max_tokens: int) -> list[Ints]:
    """Divide sequences into forward passes with a gradient; all inputs of a pass stay in memory until its backward pass.

    Args:
        lm: as in :func:`pack_sequences`; the packs of a pass are counted with repeated and padded inputs.
        order: prefix order of the sequences.
        max_tokens: maximum number of inputs in a pass; a longer sequence has a separate pass.

    Returns:
        Indices of the sequences of each pass.
    """
    if (rows := layout_of(lm).rows) != "tree":
        # A pass gets one pack, so that shorter views of its rows also fit into one pack.
        return [members for members, _ in order.padded_packs(max_tokens, mixed=rows == "padded")]
    passes: list[Ints] = []
    num_inputs = 0
    for members, size in order.packs(_pack_tokens(lm, max_tokens), block_size(lm)):
        if passes and num_inputs + size <= max_tokens:
            passes[-1] = np.concatenate((passes[-1], members))
            num_inputs += size
        else:
            passes.append(members)
            num_inputs = size
    return passes


def _pack_tokens(lm: PreTrainedModel, max_tokens: int) -> int:
    """Maximum number of nodes in a pack for a model that supports trees; padding to whole blocks stays within ``max_tokens``."""
    if not accepts_blocks(lm):
        # Matrix products cost the square of the hidden size per node, dense attention the hidden size times the nodes of the pack.
        hidden_size = int(lm.config.get_text_config().hidden_size)
        return min(max_tokens, max(_MIN_TREE_TOKENS, _TREE_TOKENS_PER_HIDDEN * hidden_size))
    limit = max_tokens if lm.device.type == "cuda" else min(max_tokens, _MAX_CPU_TOKENS)
    return limit - limit % block_size(lm) or limit


@torch.no_grad()
def score_views(
    lm: PreTrainedModel, views: Mapping[str, Sequence[ScoredSequence]], *, max_tokens: int, temperature: float = 1.0
) -> tuple[dict[str, torch.Tensor], PackedSequences | None]:
    """Compute the log-probabilities of the scored tokens of all views, which form one prefix tree, without gradient.

    Args:
        lm: a transformers causal language model.
        views: views of the same turns, by name.
        max_tokens: maximum number of input tokens in one forward pass.
        temperature: as in :func:`trial_ray.models.logprobs.gather_logprobs`.

    Returns:
        Flat ``[T]`` by the name of the view, in row order, on the model's device; and the model's inputs, ``None`` without turns.
    """
    sequences = [sequence for view in views.values() for sequence in view]
    if not sequences:
        return {name: torch.empty(0, device=lm.device) for name in views}, None
    packed = pack_sequences(lm, PrefixOrder(sequences), max_tokens)
    logprobs = sequence_logprobs(lm, packed, temperature)
    return dict(zip(views, logprobs.chunk(len(views)), strict=True)), packed
