"""The running batch of the transformers engine: rows join after their prefill and leave when their response ends."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from random import Random

import numpy as np
import torch

from trial_ray.inference.batching_engine import Request
from trial_ray.inference.decoding_cache import DecodingCache
from trial_ray.inference.sampling import sample_tokens

PREFILL_TOKENS = 8192
"""Most tokens, padding included, in one forward pass over prompts (one prompt may be longer)."""
MOST_PADDING = 512
"""Padding tokens above which prompts are rather prefilled in two forward passes."""


class _Row:
    """A request in the batch, with its own source of randomness."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.random = Random(request.params.seed)

    def take(self, token: int, logprob: float, stop_ids: frozenset[int]) -> None:
        """Append one sampled token and note whether it ends the response."""
        request = self.request
        request.response_ids.append(token)
        request.logprobs.append(logprob)
        if not math.isfinite(logprob):
            request.finish_reason = "overflow"
        elif token in stop_ids:
            request.finish_reason = "stop"
        elif len(request.response_ids) >= request.params.max_tokens:
            request.finish_reason = "length"


class DecodingBatch:
    """Rows of unequal length, decoded together; a row leaves when its response has ended.

    Args:
        model: a transformers causal language model in evaluation mode.
        stop_ids: tokens that end a response.
        max_rows: most rows that will ever run together, where that is known; memory is not taken for more.
    """

    def __init__(self, model: torch.nn.Module, stop_ids: frozenset[int], max_rows: int | None = None) -> None:
        self._model = model
        self._stop_ids = stop_ids
        self._device = next(model.parameters()).device
        self._rows: list[_Row] = []
        self._cache = DecodingCache(max_rows)

    def __len__(self) -> int:
        return len(self._rows)

    @torch.inference_mode()
    def admit(self, requests: list[Request]) -> list[Request]:
        """Prefill new rows and sample their first token; return those that are already finished."""
        for part in by_length(requests):
            rows = [_Row(request) for request in part]
            lengths = [len(request.prompt_ids) for request in part]
            self._cache.add_rows(lengths)
            ids = np.zeros((len(part), max(lengths)), np.int64)
            for row, (request, length) in enumerate(zip(part, lengths, strict=True)):
                ids[row, ids.shape[1] - length :] = request.prompt_ids
            self._sample(rows, self._forward(ids, lengths))
            self._rows += rows
        return self._drop_finished()

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Sample one more token for every row; return the requests that finished."""
        self._cache.add_column()
        ids = np.array([[row.request.response_ids[-1]] for row in self._rows])
        lengths = [self._cache.end - start for start in self._cache.starts]
        self._sample(self._rows, self._forward(ids, lengths))
        return self._drop_finished()

    def _forward(self, ids: np.ndarray, lengths: list[int]) -> torch.Tensor:
        """Logits ``[B, V]`` after the last of ``ids`` ``[B, n]``, of rows that then hold ``lengths`` tokens each."""
        seen = self._cache.columns.stop - self._cache.first
        # Of every column that is seen, the number of the row's token there; below 0 where the row has none.
        positions = torch.arange(-seen, 0)[None] + torch.tensor(lengths)[:, None]
        out = self._model(
            input_ids=torch.from_numpy(ids).to(self._device),
            attention_mask=(positions >= 0).long().to(self._device),
            position_ids=positions[:, -ids.shape[1] :].clamp(min=0).to(self._device),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: torch.Tensor = out.logits[:, -1]
        return logits

    def _sample(self, rows: list[_Row], logits: torch.Tensor) -> None:
        params = [row.request.params for row in rows]
        tokens, logprobs = sample_tokens(
            logits,
            torch.tensor([p.temperature for p in params], device=self._device),
            torch.tensor([p.top_p for p in params], device=self._device),
            torch.tensor([row.random.random() for row in rows], dtype=torch.float64, device=self._device),
        )
        for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
            row.take(token, logprob, self._stop_ids)

    def _drop_finished(self) -> list[Request]:
        finished = [index for index, row in enumerate(self._rows) if row.request.finish_reason]
        requests = [self._rows[index].request for index in finished]
        if finished:
            for source, target in self._cache.drop_rows(finished):
                self._rows[target] = self._rows[source]
            del self._rows[len(self._rows) - len(finished) :]
        return requests


def by_length(requests: Sequence[Request]) -> Iterator[list[Request]]:
    """Parts of similar length, each for one forward pass, the longest first."""
    part: list[Request] = []
    padding = 0
    for request in sorted(requests, key=lambda request: len(request.prompt_ids), reverse=True):
        if part:
            longest = len(part[0].prompt_ids)
            padding += longest - len(request.prompt_ids)
            if padding > MOST_PADDING or longest * (len(part) + 1) > PREFILL_TOKENS:
                yield part
                part, padding = [], 0
        part.append(request)
    yield part
