"""Key-value cache of the transformers engine, and how many rows fit into memory."""

from __future__ import annotations

from typing import cast

import psutil
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from trial_ray.engines.arguments import MEMORY_SHARE, MOST_ROWS, SLACK
from trial_ray.errors import EngineError


class DecodingCache(Cache):
    """A cache for transformers' models in which all rows end in the same column, and each begins where its length demands.

    A token is written into the next column of every row, a prompt into the columns left of the last one: neither copies what
    is there already. A row that leaves is replaced by the last one. Where columns or rows run out, those in use are
    moved once to where there is room again.

    Left of its first token every row holds zeros. The mask alone would not keep out what another row left there, or what a
    model computes of padding: masked attention weighs it by 0, and 0 times NaN is NaN.

    Args:
        max_rows: most rows that will ever be needed; ``None`` if unknown.

    Attributes:
        starts: column of each row's first token.
        end: column after the last token of every row.
        rows: rows that the next forward pass writes to.
        columns: columns that it writes to.
        first: first column that it sees.
        padding: bool ``[rows, columns]``, which of those that it writes to are no tokens; ``None`` where all are.
    """

    def __init__(self, max_rows: int | None = None) -> None:
        super().__init__(layer_class_to_replicate=lambda: _Layer(self))  # type: ignore[arg-type]  # called, never looked at
        self.starts: list[int] = []
        self.end = 0
        self.rows = self.columns = slice(0, 0)
        self.first = 0
        self.padding: torch.Tensor | None = None
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
        """Make room for one more token in every row; a forward pass with those tokens must follow."""
        if self.end == self.room[1]:
            self._make_room(len(self.starts), 0)
        self.rows, self.columns = slice(0, len(self.starts)), slice(self.end, self.end + 1)
        self.first = min(self.starts)
        self.padding = None
        self.end += 1

    def drop_rows(self, rows: list[int]) -> list[tuple[int, int]]:
        """Forget these rows; returns (from, to) of every row that changed its index."""
        gone, left = set(rows), len(self.starts) - len(rows)
        moved = [row for row in range(left, len(self.starts)) if row not in gone]
        moves = list(zip(moved, (row for row in rows if row < left), strict=True))
        if moves:
            seen = slice(min(self.starts), self.end)
            for layer in self._own_layers:
                layer.copy_rows(moves, seen)
        for source, target in moves:
            self.starts[target] = self.starts[source]
        del self.starts[left:]
        return moves

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers that have been written to."""
        return sum(layer.token_bytes for layer in self._own_layers)

    @property
    def _own_layers(self) -> list[_Layer]:
        return cast("list[_Layer]", self.layers)

    def _make_room(self, rows: int, longest_prompt: int) -> None:
        """So many rows, columns for a prompt left of ``end``, and at least one column right of it."""
        if rows <= self.room[0] and longest_prompt <= self.end < self.room[1]:
            return
        before = slice(min(self.starts, default=self.end), self.end)
        width = before.stop - before.start
        slack = max(16, max(width, longest_prompt) // SLACK)
        end = max(width, longest_prompt) + slack
        if rows > self.room[0]:
            rows = max(rows, min(self.room[0] * 3 // 2, self._max_rows or rows * 2))
        self.room = (max(rows, self.room[0]), max(end + slack, self.room[1]))
        for layer in self._own_layers:
            layer.move(len(self.starts), before, slice(end - width, end))
        self.starts = [start + end - self.end for start in self.starts]
        self.end = end


class _Layer(CacheLayerMixin):
    """Buffers ``[rows, heads, columns, width]`` of one layer, made when the model first writes to them."""

    is_sliding = False

    def __init__(self, cache: DecodingCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        self._cache = cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys, self.values = self._buffer(key_states), self._buffer(value_states)
        self.is_initialized = True

    def _buffer(self, like: torch.Tensor) -> torch.Tensor:
        rows, columns = self._cache.room
        return like.new_zeros(rows, like.shape[1], columns, like.shape[3])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        cache = self._cache
        if cache.padding is not None:
            cache.padding = cache.padding.to(key_states.device)  # moved by the first layer
            absent = cache.padding[:, None, :, None]
            key_states, value_states = key_states.masked_fill(absent, 0), value_states.masked_fill(absent, 0)
        self.keys[cache.rows, :, cache.columns] = key_states
        self.values[cache.rows, :, cache.columns] = value_states
        if cache.first == cache.columns.start:
            for buffer in (self.keys, self.values):
                buffer[cache.rows, :, : cache.first] = 0
            return key_states, value_states
        seen = slice(cache.first, cache.columns.stop)
        return self.keys[cache.rows, :, seen], self.values[cache.rows, :, seen]

    def get_seq_length(self) -> int:
        return self._cache.columns.start - self._cache.first

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    @property
    def token_bytes(self) -> int:
        buffers = [each for each in (self.keys, self.values) if each is not None]
        return sum(each.shape[1] * each.shape[3] * each.element_size() for each in buffers)

    def copy_rows(self, moves: list[tuple[int, int]], columns: slice) -> None:
        for buffer in (self.keys, self.values):
            assert buffer is not None
            sources, targets = torch.tensor(moves, device=buffer.device).T
            seen = buffer[:, :, columns]
            seen.index_copy_(0, targets, seen.index_select(0, sources))

    def move(self, rows: int, before: slice, after: slice) -> None:
        """Put columns ``before`` to ``after``, into new buffers where the room has grown."""
        self.keys, self.values = (
            self._moved(self.keys, rows, before, after),
            self._moved(self.values, rows, before, after),
        )

    def _moved(self, buffer: torch.Tensor | None, rows: int, before: slice, after: slice) -> torch.Tensor:
        assert buffer is not None
        used = buffer[:rows, :, before]
        if (buffer.shape[0], buffer.shape[2]) == self._cache.room:
            used = used.clone()  # the two may overlap
            buffer[:rows, :, : after.start] = 0
        else:
            buffer = self._buffer(buffer)
        buffer[:rows, :, after] = used
        return buffer


def rows_that_fit(token_bytes: int, max_model_len: int, free_bytes: int) -> int:
    """Rows of full length whose keys and values take :data:`MEMORY_SHARE` of the memory, :data:`MOST_ROWS` at most.

    Args:
        token_bytes: of the keys and values of one token over all layers.
        max_model_len: most tokens in a row.
        free_bytes: memory that is free.

    Raises:
        EngineError: not even one row fits.
    """
    row_bytes = int(max_model_len * token_bytes * (1 + 2 / SLACK))
    rows = int(free_bytes * MEMORY_SHARE) // row_bytes
    if rows < 1:
        raise EngineError(
            f"max_model_len: {max_model_len} found, of which one row takes {row_bytes / 2**20:.0f} MiB; {MEMORY_SHARE:.0%} of "
            f"the free memory, {free_bytes / 2**20:.0f} MiB, expected to hold it. Lower max_prompt_tokens or "
            "max_response_tokens, free memory, or set max_batch=1 to try all the same"
        )
    return min(rows, MOST_ROWS)


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a CUDA device, or on this machine."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
