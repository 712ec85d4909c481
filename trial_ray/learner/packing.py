"""From turns to model inputs: which sequences a forward pass scores, and how they are packed for a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from trial_ray.models.layout import layout_of, pack_rows
from trial_ray.models.logprobs import sequence_logprobs
from trial_ray.models.prefix_tree import PackedSequences, PrefixOrder, ScoredSequence
from trial_ray.models.tree_attention import block_size, takes_blocks
from trial_ray.prompts.teacher_context import Evidence, augment
from trial_ray.trajectory import Turn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CPU_TOKENS = 4096
"""On a CPU larger packs leave the caches: a tenth slower with 16,384 tokens and the quickstart's model."""
_TOKENS_PER_HIDDEN = 2
_MIN_TOKENS = 1024


def scored_turn(turn: Turn, evidence: Evidence | None = None) -> ScoredSequence:
    """Sequence that scores a turn's response after its prompt P_k, or after P_k⁺ of Eq. 3, with the evidence inserted."""
    prompt = turn.prompt_ids if evidence is None else augment(turn.prompt_ids, evidence.insert_at, evidence.ids)
    return ScoredSequence(np.concatenate((prompt, turn.response_ids)), len(turn.response_ids))


def lay_out(lm: PreTrainedModel, order: PrefixOrder, max_tokens: int) -> PackedSequences:
    """Pack sequences for a model: as prefix trees if it supports them, else as padded rows, of equal length if it requires that.

    Args:
        lm: a transformers causal language model.
        order: prefix order of the sequences.
        max_tokens: maximum number of inputs in a pack.
    """
    rows = layout_of(lm).rows
    return pack_rows(lm, rows, order, _pack_tokens(lm, max_tokens) if rows == "tree" else max_tokens)


def pass_parts(lm: PreTrainedModel, order: PrefixOrder, max_tokens: int) -> list[NDArray[np.int64]]:
    """Divide sequences into forward passes with a gradient; all inputs of a pass stay in memory until its backward pass.

    Args:
        lm: as in :func:`lay_out`; the packs of a pass are counted with repeated and padded inputs.
        order: prefix order of the sequences.
        max_tokens: maximum number of inputs in a pass; a longer sequence has a separate pass.

    Returns:
        Indices of the sequences of each pass.
    """
    if (rows := layout_of(lm).rows) != "tree":
        # One pack each: shorter views of the same rows, cut in other places, must not need more.
        return [members for members, _ in order.padded_packs(max_tokens, mixed=rows == "padded")]
    parts: list[NDArray[np.int64]] = []
    held = 0
    for members, size in order.packs(_pack_tokens(lm, max_tokens), block_size(lm)):
        if parts and held + size <= max_tokens:
            parts[-1] = np.concatenate((parts[-1], members))
            held += size
        else:
            parts.append(members)
            held = size
    return parts


def _pack_tokens(lm: PreTrainedModel, max_tokens: int) -> int:
    """Maximum number of nodes in a pack for a model that supports trees; padding to whole blocks stays within ``max_tokens``."""
    if not takes_blocks(lm):
        return min(max_tokens, tree_tokens(lm))
    most = max_tokens if lm.device.type == "cuda" else min(max_tokens, _CPU_TOKENS)
    return most - most % block_size(lm) or most


def tree_tokens(lm: PreTrainedModel) -> int:
    """Number of nodes of a tree up to which a dense mask is worth its cost.

    The cost of a node's matrix products is proportional to the square of the hidden size, the cost of its dense attention to the
    hidden size times the nodes of the pack. A larger pack repeats less at its cuts and makes fewer calls.
    """
    return max(_MIN_TOKENS, _TOKENS_PER_HIDDEN * int(lm.config.get_text_config().hidden_size))


@torch.no_grad()
def score_views(
    lm: PreTrainedModel, views: Mapping[str, Sequence[ScoredSequence]], *, max_tokens: int, temperature: float = 1.0
) -> tuple[dict[str, torch.Tensor], PackedSequences | None]:
    """Log-probabilities of the scored tokens of all views, which form one prefix tree, without gradient.

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
    packed = lay_out(lm, PrefixOrder(sequences), max_tokens)
    logprobs = sequence_logprobs(lm, packed, temperature)
    return dict(zip(views, logprobs.chunk(len(views)), strict=True)), packed
