"""From rows of turns to model inputs: which sequences a forward pass scores, and how they are packed for a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from trial_ray.models.layout import layout_of, pack_rows
from trial_ray.models.logprobs import sequence_logprobs
from trial_ray.models.prefix_tree import PackedSequences, PrefixOrder, ScoredSequence
from trial_ray.models.tree_attention import block_size, takes_blocks
from trial_ray.rollout.hindsight import augment

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NO_TOKENS = np.empty(0, np.int32)
_CPU_TOKENS = 4096
"""On a CPU larger packs leave the caches: a tenth slower with 16,384 tokens and the quickstart's model."""
_TOKENS_PER_HIDDEN = 2
_MIN_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Row:
    """One turn as the learner sees it.

    Attributes:
        prompt_ids: int ``[P]``, at least one token.
        insert_at: index in ``prompt_ids`` before which the evidence goes; in ``0..P``.
        response_ids: int ``[y]``.
        evidence_ids: int ``[z]``, possibly empty.

    Raises:
        ValueError: the prompt is empty or ``insert_at`` is out of range.
    """

    prompt_ids: np.ndarray
    insert_at: int
    response_ids: np.ndarray
    evidence_ids: np.ndarray = field(default_factory=lambda: _NO_TOKENS)

    def __post_init__(self) -> None:
        if not len(self.prompt_ids):
            raise ValueError("prompt_ids are empty; expected at least one token")
        if not 0 <= self.insert_at <= len(self.prompt_ids):
            raise ValueError(f"insert_at must lie in 0..{len(self.prompt_ids)} (the prompt); got {self.insert_at}")

    @property
    def hindsight_prompt_ids(self) -> np.ndarray:
        """P_k⁺ of Eq. 3, int32 ``[P + z]``."""
        return augment(self.prompt_ids, self.insert_at, self.evidence_ids)

    @property
    def hindsight_row(self) -> Row:
        """The hindsight view as a row of its own."""
        return Row(self.hindsight_prompt_ids, self.insert_at, self.response_ids)

    @property
    def sequence(self) -> ScoredSequence:
        """The ordinary view, its response scored."""
        return ScoredSequence(np.concatenate((self.prompt_ids, self.response_ids)), len(self.response_ids))


def lay_out(lm: PreTrainedModel, order: PrefixOrder, max_tokens: int) -> PackedSequences:
    """Pack sequences for a model: as prefix trees where it takes them, else as padded rows, of one length where it must be.

    Args:
        lm: a transformers causal language model.
        order: of the sequences.
        max_tokens: most inputs in a pack.
    """
    rows = layout_of(lm).rows
    return pack_rows(lm, rows, order, _pack_tokens(lm, max_tokens) if rows == "tree" else max_tokens)


def pass_parts(lm: PreTrainedModel, order: PrefixOrder, max_tokens: int) -> list[NDArray[np.int64]]:
    """Which sequences share a forward pass with a gradient, where all inputs of its packs stay until the backward pass.

    Args:
        lm: as in :func:`lay_out`, whose packs are counted, with what they repeat and pad.
        order: of the sequences.
        max_tokens: most inputs in a pass; a sequence that is longer has one of its own.

    Returns:
        Numbers of the sequences of each pass.
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
    """Most nodes of a pack for a model that takes trees; what fills a pack up to whole blocks stays within ``max_tokens``."""
    if not takes_blocks(lm):
        return min(max_tokens, tree_tokens(lm))
    most = max_tokens if lm.device.type == "cuda" else min(max_tokens, _CPU_TOKENS)
    return most - most % block_size(lm) or most


def tree_tokens(lm: PreTrainedModel) -> int:
    """Nodes of a tree up to which a dense mask is worth its cost.

    A node's matrix products cost in proportion to the square of the hidden size, its dense attention to the hidden size times
    the nodes of the pack. A larger pack repeats less at its cuts and makes fewer calls.
    """
    return max(_MIN_TOKENS, _TOKENS_PER_HIDDEN * int(lm.config.get_text_config().hidden_size))


@torch.no_grad()
def score_views(
    lm: PreTrainedModel, views: Mapping[str, Sequence[ScoredSequence]], *, max_tokens: int, temperature: float = 1.0
) -> tuple[dict[str, torch.Tensor], PackedSequences | None]:
    """Log-probabilities of the scored tokens of all views, which form one prefix tree, without gradient.

    Args:
        lm: a transformers causal language model.
        views: of the same turns, by name.
        max_tokens: most input tokens in one forward pass.
        temperature: as in :func:`trial_ray.models.logprobs.gather_logprobs`.

    Returns:
        Flat ``[T]`` by the name of the view, in row order, on the model's device; and the model's inputs, ``None`` without
        turns.
    """
    sequences = [sequence for view in views.values() for sequence in view]
    if not sequences:
        return {name: torch.empty(0, device=lm.device) for name in views}, None
    packed = lay_out(lm, PrefixOrder(sequences), max_tokens)
    logprobs = sequence_logprobs(lm, packed, temperature)
    return dict(zip(views, logprobs.chunk(len(views)), strict=True)), packed


def score_rows(
    lm: PreTrainedModel, rows: Sequence[Row], *, max_tokens: int, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of every response token in the ordinary and in the hindsight view, as :func:`score_views`."""
    views = {"ordinary": [row.sequence for row in rows], "hindsight": [row.hindsight_row.sequence for row in rows]}
    scores, _ = score_views(lm, views, max_tokens=max_tokens, temperature=temperature)
    return scores["ordinary"], scores["hindsight"]
