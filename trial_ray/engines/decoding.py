"""Decoding with a transformers model: sampling, and steps that add a token to every row, with or without a key-value cache."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from weakref import proxy

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from trial_ray.engines.protocol import Request
from trial_ray.engines.settings import PREFILL_TOKENS, SLACK


def sample_tokens(logits: Tensor, temperatures: Tensor, top_ps: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw the next token of every row of a batch by inverting its cumulative distribution, independently of other rows.

    Args:
        logits: ``[B, V]``, for B rows and V tokens.
        temperatures: ``[B]``; 0 takes the most probable token.
        top_ps: ``[B]`` in (0, 1]; a token is drawn from the nucleus, the smallest set of most probable tokens with at least
            this total probability.
        uniforms: float64 ``[B]`` in [0, 1), one draw per row.

    Returns:
        Token ids int64 ``[B]`` and their log-probabilities float32 ``[B]``, in nats, under the distribution that each token was
        drawn from: the softmax of ``logits / temperature``, renormalised over the nucleus. In rows with temperature 0, they are
        the model's log-probabilities without temperature and nucleus.
    """
    greedy = temperatures <= 0
    # Use float64: in float32, the error of a cumulative sum over a large vocabulary exceeds a rare token's probability.
    scaled = logits.double() / torch.where(greedy, 1.0, temperatures)[:, None]
    if bool((top_ps < 1).any()):
        scaled = _keep_nucleus(scaled, torch.where(greedy, 1.0, top_ps))
    logprobs = torch.log_softmax(scaled, dim=-1)
    cumulative = logprobs.exp().cumsum(-1)
    drawn = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1])[:, None], right=True).squeeze(-1)
    # Rounding can place the draw at or beyond the total probability.
    drawn = drawn.clamp_(max=logits.shape[-1] - 1)
    tokens = torch.where(greedy, logits.argmax(-1), drawn)
    return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1).float()


def _keep_nucleus(logits: Tensor, top_ps: Tensor) -> Tensor:
    """Set every logit outside the nucleus (the tokens that top-p sampling keeps) to minus infinity."""
    ordered, index = logits.sort(dim=-1, descending=True)
    probs = torch.softmax(ordered, dim=-1)
    # Keep tokens while the cumulative probability before them is below top_p; always keep the first.
    outside = probs.cumsum(-1) - probs >= top_ps[:, None]
    outside[:, 0] = False
    return torch.empty_like(logits).scatter(-1, index, ordered.masked_fill(outside, -torch.inf))


MARGIN = 4
"""Number of tokens before a possible stop string that are decoded with it, because the beginning of a decoded text may lack a
space or a part of a character."""
MAX_PADDING = 512
"""Maximum number of padding tokens in one prefill pass; prompts that would need more are prefilled in several passes."""


class Batch:
    """Rows of unequal length that are decoded together; a row is removed when its response has ended.

    Args:
        model: a transformers causal language model in evaluation mode.
        stop_ids: tokens that end a response.
        cached: whether keys and values are cached, for models that pass ``try_cache``. Otherwise every token requires a forward
            pass over the whole row; rows of the same length share a pass.
        max_rows: maximum number of rows that run together; no memory is allocated for more rows. ``None`` if unknown.
        decode: function from token ids to text without special tokens; ``None`` if no request has ``stop``.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        stop_ids: frozenset[int],
        *,
        cached: bool = True,
        max_rows: int | None = None,
        decode: Callable[[list[int]], str] | None = None,
    ) -> None:
        self._model = model
        self._stop_ids = stop_ids
        self._decode = decode
        self._device = next(model.parameters()).device
        self._rows: list[Request] = []
        self.cache = DecodingCache(max_rows) if cached else None

    def __len__(self) -> int:
        return len(self._rows)

    @torch.inference_mode()
    def admit(self, requests: list[Request]) -> list[Request]:
        """Add a row for each request and sample its first token; return the requests that have already finished."""
        if self.cache is None:
            self._recompute(requests)
            self._rows += requests
            return self._drop_finished()
        for part in by_length(requests):
            lengths = [len(request.prompt_ids) for request in part]
            self.cache.add_rows(lengths)
            ids = np.zeros((len(part), max(lengths)), np.int64)
            for row, request in zip(ids, part, strict=True):
                row[-len(request.prompt_ids) :] = request.prompt_ids
            self._sample(part, self._forward(self.cache, ids, lengths))
            self._rows += part
        return self._drop_finished()

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Sample one more token for every row, if there are any; return the requests of the rows that finished."""
        if not self._rows:
            return []
        if self.cache is None:
            self._recompute(self._rows)
        else:
            self.cache.add_column()
            ids = np.array([[row.response_ids[-1]] for row in self._rows])
            lengths = [self.cache.end - start for start in self.cache.starts]
            self._sample(self._rows, self._forward(self.cache, ids, lengths))
        return self._drop_finished()

    @torch.inference_mode()
    def abort(self, requests: Collection[Request]) -> None:
        """Remove the rows of these requests before they finish."""
        for request in requests:
            request.finish_reason = request.finish_reason or "aborted"
        self._drop_finished()

    def _forward(self, cache: DecodingCache, ids: np.ndarray, lengths: list[int]) -> Tensor:
        """Return next-token logits ``[B, V]`` after ``ids`` ``[B, n]``; row ``b`` has ``lengths[b]`` tokens, cached and new."""
        num_columns = cache.columns.stop - cache.first
        # positions[row, column] is a token's index in its row; it is negative for padding.
        positions = torch.arange(-num_columns, 0)[None] + torch.tensor(lengths)[:, None]
        out = self._model(
            input_ids=torch.from_numpy(ids).to(self._device),
            attention_mask=(positions >= 0).long().to(self._device),
            position_ids=positions[:, -ids.shape[1] :].clamp(min=0).to(self._device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[:, -1]

    def _recompute(self, rows: list[Request]) -> None:
        """Sample the next token of each row by forward passes over whole rows, without a cache."""
        for part in by_length(rows, max_padding=0):
            tokens = np.array([[*row.prompt_ids, *row.response_ids] for row in part])
            ids = torch.from_numpy(tokens).to(self._device)
            self._sample(part, self._model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1])

    def _sample(self, rows: list[Request], logits: Tensor) -> None:
        params = [row.params for row in rows]
        tokens, logprobs = sample_tokens(
            logits,
            torch.tensor([p.temperature for p in params], device=self._device),
            torch.tensor([p.top_p for p in params], device=self._device),
            torch.tensor([row.random.random() for row in rows], dtype=torch.float64, device=self._device),
        )
        for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
            row.append(token, logprob, self._stop_ids)
            if row.params.stop and row.finish_reason in ("", "length") and self._spells_stop(row):
                row.finish_reason = "stop"

    def _spells_stop(self, row: Request) -> bool:
        """Return whether the last token has completed a stop string."""
        assert self._decode is not None, "an engine for requests with stop has a tokenizer"
        # A stop string has at most as many tokens as bytes.
        longest = max(len(stop.encode()) for stop in row.params.stop)
        tail = self._decode(row.response_ids[-longest - MARGIN :])
        return any(stop in tail for stop in row.params.stop)

    def _drop_finished(self) -> list[Request]:
        finished = [index for index, row in enumerate(self._rows) if row.finish_reason]
        requests = [self._rows[index] for index in finished]
        if self.cache is None:
            self._rows = [row for row in self._rows if not row.finish_reason]
        elif finished:
            for source, target in self.cache.drop_rows(finished):
                self._rows[target] = self._rows[source]
            del self._rows[len(self._rows) - len(finished) :]
        return requests


def by_length(requests: Sequence[Request], max_padding: int = MAX_PADDING) -> Iterator[list[Request]]:
    """Yield requests with similar numbers of tokens together, one list for each forward pass, the longest first.

    Args:
        requests: the requests.
        max_padding: maximum number of padding tokens in one pass.
    """
    part: list[Request] = []
    padding = 0
    for request in sorted(requests, key=lambda request: request.num_tokens, reverse=True):
        if part:
            longest = part[0].num_tokens
            padding += longest - request.num_tokens
            if padding > max_padding or longest * (len(part) + 1) > PREFILL_TOKENS:
                yield part
                part, padding = [], 0
        part.append(request)
    if part:
        yield part


class DecodingCache(Cache):
    """Key-value cache for transformers models with all rows aligned on the right: they end in the same column.

    A decoding step writes one new column of all rows; the prompt of a new row is written so that it ends in the last used
    column. Both leave existing entries in place. A removed row is replaced by the last row. If columns or rows run out, the
    used entries are moved to other columns or to larger buffers.

    Every row is zero left of its first token. A mask alone would not exclude old values of another row, or values that a model
    computes for padding: masked attention multiplies them by 0, and 0 times NaN is NaN.

    Args:
        max_rows: maximum number of rows that will be needed; ``None`` if unknown.

    Attributes:
        starts: column of each row's first token.
        end: column after the last token of every row.
        rows: rows that the next forward pass writes to.
        columns: columns that the next forward pass writes to.
        first: first column that the next forward pass reads.
        padding: bool ``[rows, columns]``, true for padding in the next forward pass; ``None`` if the pass has no padding.
        room: numbers of allocated rows and columns.
    """

    layers: list[_Layer]  # type: ignore[assignment]  # transformers creates these objects.

    def __init__(self, max_rows: int | None) -> None:
        # The proxy avoids a reference cycle, which would keep unused buffers in memory until a full garbage collection.
        cache = proxy(self)
        super().__init__(layer_class_to_replicate=lambda: _Layer(cache))  # type: ignore[arg-type]  # transformers only calls it.
        self.starts: list[int] = []
        self.end = 0
        self.rows = self.columns = slice(0, 0)
        self.first = 0
        self.padding: Tensor | None = None
        self.room = (0, 0)
        self._max_rows = max_rows

    def add_rows(self, lengths: list[int]) -> None:
        """Make room for rows of these lengths; a forward pass with their left-padded prompts must follow."""
        longest, before = max(lengths), len(self.starts)
        if not before:
            self.end = 0
        self._make_room(before + len(lengths), longest)
        self.starts += [self.end - length for length in lengths]
        self.rows, self.columns = slice(before, len(self.starts)), slice(self.end - longest, self.end)
        self.first = self.columns.start
        absent = longest - torch.tensor(lengths)
        self.padding = torch.arange(longest) < absent[:, None] if bool(absent.any()) else None

    def add_column(self) -> None:
        """Make room for one more token in every row; a forward pass with these tokens must follow."""
        if self.end == self.room[1]:
            self._make_room(len(self.starts), 0)
        self.rows, self.columns = slice(0, len(self.starts)), slice(self.end, self.end + 1)
        self.first = min(self.starts)
        self.padding = None
        self.end += 1

    def drop_rows(self, rows: list[int]) -> list[tuple[int, int]]:
        """Remove these rows; return the old and the new index of every row that moved."""
        removed, count = set(rows), len(self.starts) - len(rows)
        sources = [row for row in range(count, len(self.starts)) if row not in removed]
        moves = list(zip(sources, (row for row in rows if row < count), strict=True))
        if moves:
            columns = slice(min(self.starts), self.end)
            for layer in self.layers:
                layer.copy_rows(moves, columns)
        for source, target in moves:
            self.starts[target] = self.starts[source]
        del self.starts[count:]
        return moves

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values, summed over all layers that have been written to."""
        buffers = [buffer for layer in self.layers for buffer in layer.buffers]
        return sum(buffer.shape[1] * buffer.shape[3] * buffer.element_size() for buffer in buffers)

    def _make_room(self, rows: int, longest_prompt: int) -> None:
        """Ensure room for ``rows`` rows, ``longest_prompt`` columns before ``end``, and at least one more column."""
        if rows <= self.room[0] and longest_prompt <= self.end < self.room[1]:
            return
        before = slice(min(self.starts, default=self.end), self.end)
        width = before.stop - before.start
        slack = max(16, max(width, longest_prompt) // SLACK)
        end = max(width, longest_prompt) + slack
        if rows > self.room[0]:
            rows = max(rows, min(self.room[0] * 3 // 2, self._max_rows or rows * 2))
        self.room = (max(rows, self.room[0]), max(end + slack, self.room[1]))
        for layer in self.layers:
            layer.move(len(self.starts), before, slice(end - width, end))
        self.starts = [start + end - self.end for start in self.starts]
        self.end = end


class _Layer(CacheLayerMixin):
    """Keys and values of a layer, each ``[rows, heads, columns, head size]``, allocated when the model first writes to them."""

    is_sliding = False

    def __init__(self, cache: DecodingCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers does not annotate it.
        self._cache = cache
        self.buffers: list[Tensor] = []

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = self.buffers = [self._buffer(states) for states in (key_states, value_states)]
        self.is_initialized = True

    def _buffer(self, like: Tensor) -> Tensor:
        rows, columns = self._cache.room
        return like.new_zeros(rows, like.shape[1], columns, like.shape[3])

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        cache, visible = self._cache, []
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            if cache.padding is not None:
                cache.padding = cache.padding.to(states.device)
                states = states.masked_fill(cache.padding[:, None, :, None], 0)
            buffer[cache.rows, :, cache.columns] = states
            if cache.first == cache.columns.start:
                buffer[cache.rows, :, : cache.first] = 0
                visible.append(states)
            else:
                visible.append(buffer[cache.rows, :, cache.first : cache.columns.stop])
        keys, values = visible
        return keys, values

    def get_seq_length(self) -> int:
        return self._cache.columns.start - self._cache.first

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def copy_rows(self, moves: list[tuple[int, int]], columns: slice) -> None:
        for buffer in self.buffers:
            sources, targets = torch.tensor(moves, device=buffer.device).T
            used = buffer[:, :, columns]
            used.index_copy_(0, targets, used.index_select(0, sources))

    def move(self, rows: int, before: slice, after: slice) -> None:
        """Move the entries of columns ``before`` to columns ``after``, in new buffers if ``DecodingCache.room`` has grown."""
        for index, buffer in enumerate(self.buffers):
            used = buffer[:rows, :, before]
            if (buffer.shape[0], buffer.shape[2]) == self._cache.room:
                used = used.clone()  # The source and target columns may overlap.
                buffer[:rows, :, : after.start] = 0
            else:
                buffer = self.buffers[index] = self._buffer(buffer)
            buffer[:rows, :, after] = used
        self.keys, self.values = self.buffers
