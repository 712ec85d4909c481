"""Attention alone: prefix trees by FlexAttention against variable-length flash attention over the same rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gpu_models import QWEN3, SMOLLM2, Setup
from measure import Measure
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from trial_ray.learner.packing import Row
from trial_ray.models.prefix_tree import PackedSequences, PrefixOrder, pack_trees
from trial_ray.models.tree_attention import FLEX_BLOCK, tree_block_mask, tree_mask

PACK_TOKENS = 16_384
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def kernels(setup: Setup) -> tuple[list[Measure], dict[str, Any]]:
    """Forward and backward of one layer's attention, bfloat16, for the heads of each shape."""
    groups = setup.groups(500, tasks=1 if setup.small else 4, turns=2 if setup.small else 8)
    turns = [turn for group in groups for trajectory in group.trajectories for turn in trajectory.turns]
    sequences = [Row(turn.prompt_ids, turn.insert_at, turn.response_ids).sequence for turn in turns]
    packed = pack_trees(PrefixOrder(sequences), PACK_TOKENS, setup.device, multiple_of=FLEX_BLOCK)
    lengths = [len(sequence.inputs) for sequence in sequences]
    measures, details = [], {"rows": len(lengths), "tokens": sum(lengths), "tree_tokens": packed.num_tokens}
    for name in (SMOLLM2, QWEN3):
        config = setup.model_config(name)
        heads = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        found, details[name] = compare(setup, name, heads, packed, lengths)
        measures += found
    masks = block_masks(setup, packed)
    measures.append(
        Measure(
            "block mask built directly against create_block_mask",
            masks["create_block_mask"] / masks["direct"],
            note=f"{1e3 * masks['direct']:.2f} ms against {1e3 * masks['create_block_mask']:.2f} ms",
        )
    )
    return measures, {**details, "block_mask_seconds": masks}


def compare(
    setup: Setup, name: str, heads: tuple[int, int, int], packed: PackedSequences, lengths: list[int]
) -> tuple[list[Measure], dict[str, Any]]:
    trees = [(inputs(setup, heads, pack.input_ids.shape[1]), pack.exits) for pack in packed.packs]
    attend = tree_attention(setup)

    def over_trees() -> None:
        for tensors, exits in trees:
            backward(tensors, attend(*tensors, exits))

    first = setup.once(over_trees)
    seconds = {"trees": setup.seconds(over_trees), **plain_seconds(setup, heads, lengths)}
    best = min((name for name in seconds if name != "trees"), key=seconds.__getitem__)
    speed = Measure(
        f"{name}'s heads: attention over trees against {best}",
        seconds[best] / seconds["trees"],
        target=1.0,
        note=f"{1e3 * seconds['trees']:.2f} ms for {packed.num_tokens:,} tokens against {1e3 * seconds[best]:.2f} ms for "
        f"{sum(lengths):,}, forward and backward",
    )
    difference = gradient_difference(setup, heads, attend, packed)
    gradient = Measure(
        f"{name}'s heads: gradient of trees, relative difference",
        difference,
        unit="",
        target=2e-2,
        better="lower",
        note="bfloat16 against a dense mask in float32, queries, keys and values together",
    )
    return [speed, gradient], {"seconds": seconds, "first_seconds": first}


def inputs(setup: Setup, heads: tuple[int, int, int], length: int) -> Tensors:
    queries, keys, size = heads
    shapes = (queries, keys, keys)
    options = {"device": setup.device, "dtype": torch.bfloat16, "requires_grad": True}
    query, key, value = (torch.randn(1, count, length, size, **options) for count in shapes)
    return query, key, value


def backward(tensors: Tensors, output: torch.Tensor) -> None:
    torch.autograd.grad(output, tensors, torch.ones_like(output))


def tree_attention(setup: Setup) -> Callable[..., torch.Tensor]:
    """As the learner's models attend: FlexAttention on CUDA, compiled once; on the CPU, where it has no gradient, a dense mask."""
    if not setup.cuda:
        return lambda query, key, value, exits: scaled_dot_product_attention(
            query, key, value, attn_mask=tree_mask(exits), enable_gqa=True
        )
    compiled = torch.compile(flex_attention, dynamic=True)
    return lambda query, key, value, exits: compiled(
        query, key, value, block_mask=tree_block_mask(exits), enable_gqa=True
    )


def plain_seconds(setup: Setup, heads: tuple[int, int, int], lengths: list[int]) -> dict[str, float]:
    """Every row by itself: padded to the longest, and on CUDA without padding."""
    batch, most = len(lengths), max(lengths)
    padded = tuple(
        torch.randn(batch, count, most, heads[2], device=setup.device, dtype=torch.bfloat16, requires_grad=True)
        for count in (heads[0], heads[1], heads[1])
    )

    def over_padding() -> None:
        backward(padded, scaled_dot_product_attention(*padded, is_causal=True, enable_gqa=True))

    seconds = {"padded flash attention": setup.seconds(over_padding)}
    if setup.cuda:
        seconds["variable-length flash attention"] = varlen_seconds(setup, heads, lengths)
    return seconds


def varlen_seconds(setup: Setup, heads: tuple[int, int, int], lengths: list[int]) -> float:
    from torch.nn.attention.varlen import varlen_attn

    options = {"device": setup.device, "dtype": torch.bfloat16, "requires_grad": True}
    tensors = tuple(torch.randn(sum(lengths), count, heads[2], **options) for count in (heads[0], heads[1], heads[1]))
    bounds = torch.tensor(np.concatenate([[0], np.cumsum(lengths)]), dtype=torch.int32, device=setup.device)

    def over_rows() -> None:
        output = varlen_attn(
            *tensors, bounds, bounds, max(lengths), max(lengths), window_size=(-1, 0), enable_gqa=heads[0] != heads[1]
        )
        backward(tensors, output)

    return setup.seconds(over_rows)


def gradient_difference(
    setup: Setup, heads: tuple[int, int, int], attend: Callable[..., torch.Tensor], packed: PackedSequences
) -> float:
    pack = min(packed.packs, key=lambda each: each.input_ids.shape[1])  # a dense mask of a large one takes gigabytes
    tensors = inputs(setup, heads, pack.input_ids.shape[1])
    weights = torch.randn_like(tensors[0])
    found = torch.autograd.grad((attend(*tensors, pack.exits) * weights).sum(), tensors)
    wide = tuple(tensor.detach().float().requires_grad_() for tensor in tensors)
    dense = scaled_dot_product_attention(*wide, attn_mask=tree_mask(pack.exits), enable_gqa=True)
    expected = torch.autograd.grad((dense * weights.float()).sum(), wide)
    difference = sum(float((one.float() - other).square().sum()) for one, other in zip(found, expected, strict=True))
    return (difference / sum(float(each.square().sum()) for each in expected)) ** 0.5


def block_masks(setup: Setup, packed: PackedSequences) -> dict[str, float]:
    exits = packed.packs[0].exits
    length = len(exits)

    def visible(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (query < exits[key])

    return {
        "direct": setup.seconds(lambda: tree_block_mask(exits)),
        "create_block_mask": setup.seconds(
            lambda: create_block_mask(visible, None, None, length, length, device=setup.device)
        ),
    }
