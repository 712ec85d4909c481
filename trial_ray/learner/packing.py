"""From rows of turns to model inputs: padded batches, and the packed form that scores both views at once.

A turn is scored twice: its response after the ordinary prompt h, and the same response after the hindsight prompt h⁺, which
is the ordinary prompt with evidence inserted. Both views begin alike, so one sequence can hold them as two branches::

    prefix | suffix, response            (branch A: the ordinary view)
           | evidence, suffix, response  (branch B: the hindsight view; does not see branch A)

which costs P + z + suffix + 2y tokens instead of 2(P + y) + z. A response's last token predicts nothing, so it is left out
of the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from trial_ray.hindsight.aug import augment
from trial_ray.models.logprobs import DEFAULT_CHUNK_TOKENS, token_logprobs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NO_TOKENS = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Row:
    """One turn as the learner sees it.

    Attributes:
        prompt_ids: int ``[P]``, at least one token.
        insert_at: index in ``prompt_ids`` before which the evidence goes; in ``1..P``.
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
        if not 1 <= self.insert_at <= len(self.prompt_ids):
            raise ValueError(f"insert_at must lie in 1..{len(self.prompt_ids)} (the prompt); got {self.insert_at}")

    @property
    def hindsight_prompt_ids(self) -> np.ndarray:
        """P_k⁺ of Eq. 3, int32 ``[P + z]``."""
        return augment(self.prompt_ids, self.insert_at, self.evidence_ids)

    @property
    def hindsight_row(self) -> Row:
        """The hindsight view as a row of its own."""
        return Row(self.hindsight_prompt_ids, self.insert_at, self.response_ids)

    @property
    def length(self) -> int:
        """Input tokens of the ordinary view."""
        return len(self.prompt_ids) + max(0, len(self.response_ids) - 1)

    @property
    def two_view_length(self) -> int:
        """Input tokens of the packed two-branch form."""
        branch = len(self.prompt_ids) - self.insert_at + max(0, len(self.response_ids) - 1)
        return self.insert_at + 2 * branch + len(self.evidence_ids)


@dataclass(frozen=True, slots=True)
class OrdinaryBatch:
    """Rows padded on the right, for plain causal attention.

    Padding needs no mask: under causal attention no real token sees what follows it. Positions count on through the
    padding, because transformers takes a jump in them for a packed sequence and would then build a mask.

    Attributes:
        input_ids: int64 ``[B, L]``.
        position_ids: int64 ``[1, L]``.
        rows, positions: int64 ``[T]``, where each response token's predecessor sits.
        targets: int64 ``[T]``, the response tokens of all rows, in row order.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor

    @classmethod
    def from_rows(cls, rows: Sequence[Row], device: torch.device | str = "cpu") -> OrdinaryBatch:
        """Build the batch on ``device``."""
        length = max(row.length for row in rows)
        input_ids = np.zeros((len(rows), length), np.int64)
        for index, row in enumerate(rows):
            prompt = len(row.prompt_ids)
            input_ids[index, :prompt] = row.prompt_ids
            input_ids[index, prompt : row.length] = row.response_ids[:-1]
        positions = _response_positions(rows, np.array([len(row.prompt_ids) for row in rows]))
        arrays = input_ids, np.arange(length)[None], *_response_rows_and_targets(rows)
        inputs, position_ids, row_ids, targets = (torch.from_numpy(array).to(device) for array in arrays)
        return cls(inputs, position_ids, row_ids, torch.from_numpy(positions).to(device), targets)


@dataclass(frozen=True, slots=True)
class TwoViewBatch:
    """Rows in the packed two-branch form, padded on the right.

    Attributes:
        input_ids, position_ids: int64 ``[B, L]``; branch B's positions start again where the branches part.
        branches: int8 ``[B, L]``: 0 prefix, 1 ordinary branch, 2 hindsight branch, 3 padding.
        rows: int64 ``[T]``.
        positions, hindsight_positions: int64 ``[T]``, where each response token's predecessor sits in either view.
        targets: int64 ``[T]``, the response tokens of all rows, in row order: the same for both views.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    branches: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor
    hindsight_positions: torch.Tensor
    targets: torch.Tensor

    @classmethod
    def from_rows(cls, rows: Sequence[Row], device: torch.device | str = "cpu") -> TwoViewBatch:
        """Build the batch on ``device``."""
        shape = len(rows), max(row.two_view_length for row in rows)
        input_ids, position_ids = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        branches = np.full(shape, 3, np.int8)
        for index, row in enumerate(rows):
            end_a, end_b, fork = row.length, row.two_view_length, row.insert_at
            suffix = row.prompt_ids[fork:], row.response_ids[:-1]
            input_ids[index, :end_b] = np.concatenate((row.prompt_ids[:fork], *suffix, row.evidence_ids, *suffix))
            position_ids[index, :end_a] = np.arange(end_a)
            position_ids[index, end_a:end_b] = np.arange(fork, fork + end_b - end_a)
            branches[index, :fork], branches[index, fork:end_a], branches[index, end_a:end_b] = 0, 1, 2
        positions = _response_positions(rows, np.array([len(row.prompt_ids) for row in rows]))
        starts = [row.two_view_length - max(0, len(row.response_ids) - 1) for row in rows]
        hindsight_positions = _response_positions(rows, np.array(starts), _hindsight_forks(rows))
        row_ids, targets = _response_rows_and_targets(rows)
        arrays = input_ids, position_ids, branches, row_ids, positions, hindsight_positions, targets
        return cls(*(torch.from_numpy(array).to(device) for array in arrays))

    def attention_mask(self, implementation: str, dtype: torch.dtype) -> torch.Tensor:
        """The 4-D mask ``[B, 1, L, L]`` that a transformers model uses as it is.

        Bool (True: attend) for ``"sdpa"``, additive in ``dtype`` for ``"eager"``, which adds what it is given.
        """
        query, key = self.branches[:, None, :, None], self.branches[:, None, None, :]
        causal = torch.ones(self.input_ids.shape[1], self.input_ids.shape[1], dtype=torch.bool, device=query.device)
        visible = ((key == 0) | (key == query)) & causal.tril()
        if implementation == "sdpa":
            return visible
        return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
            ~visible, torch.finfo(dtype).min
        )


def _hindsight_forks(rows: Sequence[Row]) -> np.ndarray:
    """For rows whose hindsight branch begins with the response, the prefix's last position; else -1; int64 ``[B]``."""
    bare = [len(row.evidence_ids) == 0 and row.insert_at == len(row.prompt_ids) for row in rows]
    return np.array([row.insert_at - 1 if alone else -1 for row, alone in zip(rows, bare, strict=True)])


def _response_positions(rows: Sequence[Row], starts: np.ndarray, forks: np.ndarray | None = None) -> np.ndarray:
    """Positions of the predecessors of all response tokens, int64 ``[T]``; ``starts [B]`` is where each response begins."""
    lengths = np.array([len(row.response_ids) for row in rows])
    first = np.repeat(np.cumsum(lengths) - lengths, lengths)
    offsets = np.arange(lengths.sum()) - first
    positions: NDArray[np.int64] = np.repeat(starts, lengths) + offsets - 1
    if forks is not None:
        fork = np.repeat(forks, lengths)
        positions = np.where((offsets == 0) & (fork >= 0), fork, positions)
    return positions.astype(np.int64)


def _response_rows_and_targets(rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray]:
    row_ids = np.repeat(np.arange(len(rows)), [len(row.response_ids) for row in rows])
    targets = np.concatenate([row.response_ids for row in rows])
    return row_ids.astype(np.int64), targets.astype(np.int64)


def make_buckets(
    lengths: Sequence[int] | np.ndarray, max_tokens_per_batch: int, max_padding: float | None = None
) -> list[np.ndarray]:
    """Split rows into batches whose padded size stays within a budget, the longest rows first.

    A split for memory and speed only: every row is in exactly one batch, and no sum depends on which. A row longer than
    the budget gets a batch of its own.

    Args:
        lengths: ``[N]`` tokens of each row.
        max_tokens_per_batch: most tokens in a batch, padding included.
        max_padding: also close a batch where the next row would be padded by more than this share of its own length.

    Returns:
        Index arrays, int64, that together are a permutation of ``0..N-1``.
    """
    if max_tokens_per_batch < 1:
        raise ValueError(f"max_tokens_per_batch must be positive; got {max_tokens_per_batch}")
    lengths = np.asarray(lengths, np.int64)
    order = np.argsort(-lengths, kind="stable")
    buckets, start = [], 0
    while start < len(order):
        longest = max(1, int(lengths[order[start]]))
        stop = start + max(1, max_tokens_per_batch // longest)
        if max_padding is not None:
            # Lengths fall along the order, so the rows that are long enough come first.
            stop = min(stop, start + int(np.sum(lengths[order[start:stop]] * (1 + max_padding) >= longest)))
        buckets.append(order[start:stop])
        start = stop
    return buckets


def can_pack_views(lm: PreTrainedModel) -> bool:
    """Whether this model takes the two-branch mask: sdpa or eager attention, and full attention in every layer."""
    layer_types = getattr(lm.config, "layer_types", None) or ["full_attention"]
    return lm.config._attn_implementation in ("sdpa", "eager") and set(layer_types) == {"full_attention"}


@torch.no_grad()
def score_rows(
    lm: PreTrainedModel,
    rows: Sequence[Row],
    *,
    two_views: bool,
    max_tokens: int,
    temperature: float = 1.0,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probabilities of every response token, in the ordinary and on request in the hindsight view, without gradient.

    Both views of a row go through the same forward pass where the model can pack them, else through two plain ones.

    Args:
        lm: a transformers causal language model.
        rows: the turns.
        two_views: whether to score the hindsight views too.
        max_tokens: most input tokens in one forward pass, padding included.
        temperature: as in :func:`trial_ray.models.logprobs.gather_logprobs`.
        chunk_tokens: as there.

    Returns:
        ``(logprobs [T], hindsight_logprobs [T] or None)``: flat, in row order, on the model's device.
    """
    options = {"temperature": temperature, "chunk_tokens": chunk_tokens}
    if not two_views:
        return _score_plain(lm, rows, max_tokens, options), None
    if can_pack_views(lm):
        return _score_packed(lm, rows, max_tokens, options)
    hindsight_rows = [row.hindsight_row for row in rows]
    return _score_plain(lm, rows, max_tokens, options), _score_plain(lm, hindsight_rows, max_tokens, options)


def _score_plain(lm: PreTrainedModel, rows: Sequence[Row], max_tokens: int, options: dict[str, Any]) -> torch.Tensor:
    buckets = make_buckets([row.length for row in rows], max_tokens)
    parts = []
    for bucket in buckets:
        batch = OrdinaryBatch.from_rows([rows[index] for index in bucket], lm.device)
        where = batch.rows, batch.positions
        parts.append(token_logprobs(lm, batch.input_ids, batch.position_ids, where, batch.targets, **options)[0])
    return _in_row_order(rows, buckets, parts, lm.device)


def _score_packed(
    lm: PreTrainedModel, rows: Sequence[Row], max_tokens: int, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    buckets = make_buckets([row.two_view_length for row in rows], max_tokens)
    ordinary, hindsight = [], []
    for bucket in buckets:
        batch = TwoViewBatch.from_rows([rows[index] for index in bucket], lm.device)
        where = batch.rows.repeat(2), torch.cat((batch.positions, batch.hindsight_positions))
        mask = batch.attention_mask(lm.config._attn_implementation, lm.dtype)
        logprobs, _ = token_logprobs(
            lm, batch.input_ids, batch.position_ids, where, batch.targets.repeat(2), attention_mask=mask, **options
        )
        ordinary.append(logprobs[: len(batch.targets)])
        hindsight.append(logprobs[len(batch.targets) :])
    return _in_row_order(rows, buckets, ordinary, lm.device), _in_row_order(rows, buckets, hindsight, lm.device)


def _in_row_order(
    rows: Sequence[Row], buckets: list[np.ndarray], parts: list[torch.Tensor], device: torch.device
) -> torch.Tensor:
    """Undo the buckets: flat values of the buckets' rows to flat values in the order of ``rows``."""
    if not rows:
        return torch.empty(0, device=device)
    lengths = np.array([len(row.response_ids) for row in rows])
    starts = np.cumsum(lengths) - lengths
    positions = [np.arange(starts[index], starts[index] + lengths[index]) for bucket in buckets for index in bucket]
    values = torch.cat(parts)
    result = torch.empty_like(values)
    result[torch.from_numpy(np.concatenate(positions)).to(device)] = values
    return result
