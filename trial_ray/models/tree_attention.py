"""Attention over a prefix tree: a boolean mask for SDPA, or a block mask for FlexAttention where that is faster."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

IMPLEMENTATION = "prefix_tree"
"""``attn_implementation`` of a transformers model whose attention takes a :class:`BlockMask` as well as what SDPA takes."""
BLOCK = 128
"""Nodes in a block of a block mask; packs for FlexAttention are filled up to a multiple of it."""
MIN_FLEX_TOKENS = 1024
"""Shorter packs take SDPA, which is faster there."""


def takes_trees(lm: PreTrainedModel) -> bool:
    """Whether every layer of a model is plain causal attention over rotary positions, so that a mask makes any tree of it."""
    config = lm.config
    layer_types = getattr(config, "layer_types", None)
    windowed = layer_types is None and getattr(config, "sliding_window", None) is not None
    rotary = any(getattr(config, name, None) is not None for name in ("rope_parameters", "rope_theta"))
    plain = set(layer_types or ["full_attention"]) == {"full_attention"} and not windowed
    return plain and rotary and config._attn_implementation in ("sdpa", "eager", IMPLEMENTATION)


def takes_block_masks(lm: PreTrainedModel) -> bool:
    """Whether long packs go through FlexAttention: on CUDA, for models that :func:`register` prepared."""
    # A model that keeps attention of its own would take the block mask for a tensor.
    dispatches = getattr(lm, "_supports_attention_backend", False)
    return bool(dispatches and lm.device.type == "cuda" and lm.config._attn_implementation == IMPLEMENTATION)


def tree_mask(exits: torch.Tensor) -> torch.Tensor:
    """Which node sees which, bool ``[1, 1, L, L]`` (query, key), from ``exits [L]``."""
    nodes = torch.arange(len(exits), device=exits.device)
    visible = (nodes[None] <= nodes[:, None]) & (nodes[:, None] < exits[None])
    return visible[None, None]


def tree_block_mask(exits: torch.Tensor) -> BlockMask:
    """The same as a block mask, from the nodes' exits alone; L is a multiple of :data:`BLOCK`.

    The exits of a block's keys say which blocks of queries see some of them, and which see them all; nothing of size L x L
    is ever made.
    """
    length = len(exits)
    blocks = exits.view(-1, BLOCK)
    starts = torch.arange(0, length, BLOCK, device=exits.device)
    before = starts[None] < starts[:, None]
    full = before & (blocks.amin(1)[None] >= starts[:, None] + BLOCK)
    partial = before & ~full & (blocks.amax(1)[None] > starts[:, None])
    partial |= starts[None] == starts[:, None]

    def visible(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (query < exits[key])

    return BlockMask.from_kv_blocks(
        *_indices(partial), *_indices(full), BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(length, length)
    )


def attention_mask(lm: PreTrainedModel, exits: torch.Tensor) -> torch.Tensor | BlockMask:
    """What a model of :func:`takes_trees` takes as its ``attention_mask`` for a tree."""
    if takes_block_masks(lm) and len(exits) >= MIN_FLEX_TOKENS and len(exits) % BLOCK == 0:
        return tree_block_mask(exits)
    visible = tree_mask(exits)
    if lm.config._attn_implementation != "eager":
        return visible
    hidden = torch.finfo(lm.dtype).min
    return torch.zeros(visible.shape, dtype=lm.dtype, device=exits.device).masked_fill_(~visible, hidden)


def register() -> str:
    """Make :data:`IMPLEMENTATION` known to transformers; returns it."""
    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, sdpa_mask)
    return IMPLEMENTATION


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | BlockMask | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The signature of transformers' attention functions; returns ``[B, L, heads, head size]``."""
    if not isinstance(attention_mask, BlockMask):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    attend: Callable[..., torch.Tensor] = _compiled_flex_attention() if query.is_cuda else flex_attention  # type: ignore[assignment]  # may return more, when asked
    grouped = query.shape[1] != key.shape[1]
    output = attend(query, key, value, block_mask=attention_mask, scale=scaling, enable_gqa=grouped)
    return output.transpose(1, 2).contiguous(), None


@cache
def _compiled_flex_attention() -> Callable[..., torch.Tensor]:
    # dynamic: compiled once, and not again for each length.
    return torch.compile(flex_attention, dynamic=True)


def _indices(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of the chosen key blocks of each query block, those first, and how many they are; ``[1, 1, Q]``, ``[1, 1, Q, K]``."""
    counts = blocks.sum(1, dtype=torch.int32)
    order = blocks.to(torch.int8).argsort(dim=1, descending=True, stable=True).to(torch.int32)
    return counts[None, None], order[None, None]
