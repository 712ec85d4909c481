"""Attention over a prefix tree of tokens.

On a GPU, FlexAttention computes the attention with a block mask. On the CPU, SDPA computes it for blocks of queries with the keys
that they need. If the tree consists of a few long segments without branches, as in conversations whose turns continue each
other, SDPA instead computes causal attention of each segment with its ancestors. For small trees on a GPU, and for models that
do not use this module's attention, the attention mask has an entry for every pair of nodes.

A tree is given by ``exits [L]``: for each node, the index after its last descendant. A pack is a tree that is computed in one
forward pass. Nodes are in depth-first order, and a block consists of consecutive nodes. If an ancestor of one of its nodes is
before the block, the block's first node is a descendant of this ancestor, too. As keys, a block therefore needs only the
ancestors of its first node and its own nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IMPLEMENTATION = "prefix_tree"
"""Name of this module's attention for transformers' ``attn_implementation``. The attention accepts what transformers' SDPA
attention accepts, and the arguments that :func:`attention_inputs` returns for a tree."""
FLEX_BLOCK = 128
"""Number of nodes in a block of FlexAttention's block mask; packs on a GPU are padded to a multiple of this number."""
SDPA_BLOCK = 64
"""Number of queries in a block of SDPA on the CPU; packs on the CPU are padded to a multiple of this number."""
MIN_SEGMENT = 256
"""Minimum mean number of nodes in a tree's segments (see :func:`tree_segments`) for which attention is computed segment by
segment. If the segments are shorter, attention is faster when it is computed in blocks of :data:`SDPA_BLOCK` queries."""
MIN_FLEX_TOKENS = 1024
"""Minimum number of nodes in a pack that FlexAttention computes; for smaller packs, SDPA with a mask is faster."""


def accepts_blocks(lm: PreTrainedModel) -> bool:
    """Return whether a model uses this module's attention, which is registered as :data:`IMPLEMENTATION`.

    This attention accepts FlexAttention's block masks and, on the CPU, the indices of the keys that each block of queries needs.
    """
    # A model that does not use transformers' attention interface cannot use a block mask.
    dispatches = getattr(lm, "_supports_attention_backend", False)
    return bool(dispatches and lm.config._attn_implementation == IMPLEMENTATION)


def block_size(lm: PreTrainedModel) -> int:
    """Return the number of nodes in a block; packs are padded to whole blocks. The number is 1 if the model accepts no blocks."""
    if not accepts_blocks(lm):
        return 1
    return FLEX_BLOCK if lm.device.type == "cuda" else SDPA_BLOCK


def tree_mask(exits: Tensor) -> Tensor:
    """Return the mask of the keys visible to each query, bool ``[1, 1, L, L]`` (query, key).

    Args:
        exits: integer ``[L]``, for each node the index after its last descendant.
    """
    nodes = torch.arange(len(exits), device=exits.device)
    visible = (nodes[None] <= nodes[:, None]) & (nodes[:, None] < exits[None])
    return visible[None, None]


def tree_block_mask(exits: Tensor) -> BlockMask:
    """Return the mask of :func:`tree_mask` as FlexAttention's block mask; L is a multiple of :data:`FLEX_BLOCK`.

    The exits of a block's keys determine which blocks of queries see some of the keys, and which see all. No tensor of size
    L x L is created.
    """
    length = len(exits)
    blocks = exits.view(-1, FLEX_BLOCK)
    starts = torch.arange(0, length, FLEX_BLOCK, device=exits.device)
    before = starts[None] < starts[:, None]
    full = before & (blocks.amin(1)[None] >= starts[:, None] + FLEX_BLOCK)
    partial = before & ~full & (blocks.amax(1)[None] > starts[:, None])
    partial |= starts[None] == starts[:, None]

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < exits[key])

    return BlockMask.from_kv_blocks(
        *_indices(partial), *_indices(full), BLOCK_SIZE=FLEX_BLOCK, mask_mod=visible, seq_lengths=(length, length)
    )


def tree_blocks(exits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys that each block of :data:`SDPA_BLOCK` queries needs, and which of them each query sees.

    Args:
        exits: int64 ``[L]``, for each node the index after its last descendant; L is a multiple of the block size.

    Returns:
        ``keys`` int64 ``[Q, K]``: the ancestors of each block's first node, padded with 0 in front, then the block's own nodes;
        and ``visible`` bool ``[Q, 1, block, K]``.
    """
    exits = exits.to(torch.int32)  # With int32, this function takes half the time that it takes with int64.
    nodes = torch.arange(len(exits), dtype=torch.int32, device=exits.device)
    queries = nodes.view(-1, SDPA_BLOCK)
    starts = queries[:, 0]
    block, ancestor = torch.nonzero((nodes[None] < starts[:, None]) & (exits[None] > starts[:, None]), as_tuple=True)
    counts = torch.bincount(block, minlength=len(starts))
    width = int(counts.max())
    keys = torch.zeros(len(starts), width, dtype=torch.int64, device=exits.device)
    # Keys of the padding have an exit of 0, so no query sees them.
    ends = torch.zeros(len(starts), width, dtype=torch.int32, device=exits.device)
    column = torch.arange(len(block), device=exits.device) - (counts.cumsum(0) - counts)[block] + width - counts[block]
    keys[block, column] = ancestor
    ends[block, column] = exits[ancestor]
    ancestors_visible = queries[:, :, None] < ends[:, None]
    own_visible = (queries[:, None] <= queries[:, :, None]) & (queries[:, :, None] < exits.view_as(queries)[:, None])
    return torch.cat((keys, queries), 1), torch.cat((ancestors_visible, own_visible), 2)[:, None]


def tree_segments(exits: Tensor) -> list[tuple[Tensor, int, int]] | None:
    """Split a tree into unbranched segments, or return ``None`` if attention is faster when it is computed in blocks.

    The result is ``None`` if the segments are shorter than :data:`MIN_SEGMENT` on average, or if they have more ancestors in
    total than the tree has nodes, because the attention of each segment is computed together with its ancestors.

    Args:
        exits: int64 ``[L]``, for each node the index after its last descendant.

    Returns:
        For each segment, the ancestors of its first node in order, int64 ``[A]``, its first node, and the node after its last.
    """
    nodes = torch.arange(1, len(exits) + 1, device=exits.device)
    # A node continues the segment of the node before it if it is the only child of that node.
    begins = torch.nonzero((exits[:-1] != exits[1:]) | (exits[:-1] == nodes[:-1])).flatten() + 1
    bounds = [0, *begins.tolist(), len(exits)]
    # Do not count segments of one node: each node of the padding is such a segment.
    if sum(end - start > 1 for start, end in pairwise(bounds)) * MIN_SEGMENT > len(exits):
        return None
    segments = [(torch.nonzero(exits[:start] > start).flatten(), start, end) for start, end in pairwise(bounds)]
    return segments if sum(len(ancestors) for ancestors, *_ in segments) <= len(exits) else None


def attention_inputs(lm: PreTrainedModel, exits: Tensor) -> dict[str, Any]:
    """Return the decoder's keyword arguments for attention over the tree of ``exits [L]``, as in :func:`tree_mask`."""
    blocks = accepts_blocks(lm)
    if blocks and exits.is_cuda and len(exits) >= MIN_FLEX_TOKENS:
        return {"attention_mask": tree_block_mask(exits)}
    if blocks and not exits.is_cuda:
        if segments := tree_segments(exits):
            # This placeholder is not used; it only keeps transformers from making a mask.
            return {"attention_mask": torch.zeros(1, 1, 1, 1), "tree_segments": segments}
        keys, visible = tree_blocks(exits)
        # Convert and repeat the mask here, once: otherwise every layer would do it.
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else lm.dtype
        config = lm.config.get_text_config()
        heads: int = config.num_attention_heads
        # Query heads of a group share a key head.
        group = heads // (getattr(config, "num_key_value_heads", None) or heads)
        mask = _added_mask(visible, dtype, -torch.inf).repeat(1, 1, group, 1)
        return {"attention_mask": mask, "tree_keys": keys}
    visible = tree_mask(exits)
    if lm.config._attn_implementation != "eager":
        return {"attention_mask": visible}
    return {"attention_mask": _added_mask(visible, lm.dtype, torch.finfo(lm.dtype).min)}


def _added_mask(visible: Tensor, dtype: torch.dtype, hidden: float) -> Tensor:
    """Return the bias on attention scores: 0 where a key is visible, ``hidden`` elsewhere."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, hidden)


def register() -> str:
    """Register :data:`IMPLEMENTATION` with transformers, and return it."""
    # Import here: configs import this module, and transformers' models take three seconds to import.
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, sdpa_mask)
    return IMPLEMENTATION


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | BlockMask | None,
    scaling: float | None = None,
    tree_keys: Tensor | None = None,
    tree_segments: list[tuple[Tensor, int, int]] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention with the signature of transformers' attention functions; return ``[B, L, heads, head size]``, None."""
    if tree_segments is not None:
        return _segment_attention(query, key, value, scaling, tree_segments), None
    if tree_keys is not None and isinstance(attention_mask, Tensor):
        return _block_attention(query, key, value, attention_mask, scaling, tree_keys), None
    if not isinstance(attention_mask, BlockMask):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    # Under autocast, norms and rotary positions return float32, so queries and keys may have another dtype than values.
    query, key = query.to(value.dtype), key.to(value.dtype)
    # In a compiled layer, FlexAttention is compiled with the layer.
    compile_here = query.is_cuda and not torch.compiler.is_compiling()
    attend = _compiled_flex_attention() if compile_here else flex_attention_in_blocks
    return attend(query, key, value, attention_mask, scaling).transpose(1, 2).contiguous(), None


def flex_attention_in_blocks(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float | None) -> Tensor:
    """Compute FlexAttention of a pack that is padded to whole blocks; inputs and output are ``[1, heads, L, head size]``."""
    # If the compiler knows that the length is a multiple of the block size, the kernel does not compare positions with the
    # length. The compiler has separate symbols for the lengths of the mask and of the inputs, which the equality checks below
    # merge. Since the compiler loses facts about symbols that it merges, the divisibility check is the last one.
    length = query.shape[2]
    torch._check(mask.seq_lengths[0] == length)
    torch._check(mask.seq_lengths[1] == length)
    torch._check(key.shape[2] == length)
    torch._check(value.shape[2] == length)
    torch._check(length % FLEX_BLOCK == 0)
    grouped = query.shape[1] != key.shape[1]
    return flex_attention(query, key, value, block_mask=mask, scale=scale, enable_gqa=grouped)


def _block_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float | None,
    keys: Tensor,
) -> Tensor:
    """Compute attention of each block of queries to the keys that the block needs, ``[1, L, heads, head size]``.

    ``mask``, ``[Q, 1, query heads of a key head x block, K]``, is added to the attention scores of the Q blocks.
    """
    (num_blocks, width), num_heads, num_key_heads = keys.shape, query.shape[1], key.shape[1]

    def by_block(values: Tensor) -> Tensor:
        rows = values[0].transpose(0, 1).flatten(1).index_select(0, keys.flatten())
        return rows.view(num_blocks, width, num_key_heads, -1).transpose(1, 2)

    # Query heads that share a key head become additional queries of it, so that keys are not copied.
    group = num_heads // num_key_heads
    queries = query[0].unflatten(1, (num_blocks, -1)).transpose(0, 1)  # [blocks, heads, tokens of a block, head size]
    queries = queries.unflatten(1, (num_key_heads, group)).flatten(2, 3)
    output: Tensor = scaled_dot_product_attention(
        queries, by_block(key), by_block(value), attn_mask=mask.to(query.dtype), scale=scaling
    )
    output = output.unflatten(2, (group, -1)).flatten(1, 2)
    return output.transpose(1, 2).flatten(0, 1)[None]


def _segment_attention(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, segments: list[tuple[Tensor, int, int]]
) -> Tensor:
    """Compute causal attention of each segment with its ancestors, ``[1, L, heads, head size]``.

    The outputs of ancestors are dropped, because they belong to other segments.
    """
    group = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(group, 1) if group > 1 else states for states in (key, value))
    wholes, outputs = (query, key, value), []
    for ancestors, start, end in segments:
        states = [whole[:, :, start:end] for whole in wholes]
        if len(ancestors):
            states = [torch.cat((w[:, :, ancestors], s), 2) for w, s in zip(wholes, states, strict=True)]
        if states[2].shape[2] == 1:  # A token that sees only itself, such as padding, outputs its value vector.
            outputs.append(states[2])
            continue
        q, k, v = states
        output = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)
        outputs.append(output[:, :, len(ancestors) :])
    return torch.cat(outputs, 2).transpose(1, 2)


@cache
def _compiled_flex_attention() -> Callable[..., Tensor]:
    # With dynamic shapes, the function is compiled once for all lengths.
    return torch.compile(flex_attention_in_blocks, dynamic=True)


def _indices(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Convert a bool matrix of chosen (query block, key block) pairs to the format of ``BlockMask.from_kv_blocks``.

    Returns:
        Number of chosen key blocks of each query block, int32 ``[1, 1, Q]``, and all key blocks of each query block with the
        chosen ones first, int32 ``[1, 1, Q, K]``.
    """
    counts = blocks.sum(1, dtype=torch.int32)
    order = blocks.to(torch.int8).argsort(dim=1, descending=True, stable=True).to(torch.int32)
    return counts[None, None], order[None, None]
