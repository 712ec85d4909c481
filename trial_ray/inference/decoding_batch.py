"""The running batch of the transformers engine: rows join after their prefill and leave when their response ends."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from torch.nn import functional

from trial_ray.inference.batching_engine import Request
from trial_ray.inference.sampling import sample_tokens


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
        if token in stop_ids:
            request.finish_reason = "stop"
        elif len(request.response_ids) >= request.params.max_tokens:
            request.finish_reason = "length"


class DecodingBatch:
    """Rows of unequal length in one left-padded key-value cache.

    Args:
        model: a transformers causal language model in evaluation mode.
        stop_ids: tokens that end a response.
    """

    def __init__(self, model: torch.nn.Module, stop_ids: frozenset[int]) -> None:
        self._model = model
        self._stop_ids = stop_ids
        self._device = next(model.parameters()).device
        self._rows: list[_Row] = []
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []  # keys and values, each [B, heads, L, width]
        self._mask = torch.zeros(0, 0, dtype=torch.long, device=self._device)  # [B, L]

    def __len__(self) -> int:
        return len(self._rows)

    @torch.inference_mode()
    def admit(self, requests: list[Request]) -> list[Request]:
        """Prefill new rows and sample their first token; return those that are already finished."""
        longest = max(len(request.prompt_ids) for request in requests)
        ids = torch.zeros(len(requests), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            start = longest - len(request.prompt_ids)
            ids[row, start:] = torch.as_tensor(request.prompt_ids, dtype=torch.long)
            mask[row, start:] = 1
        rows = [_Row(request) for request in requests]
        mask = mask.to(self._device)
        logits, layers = self._forward(ids.to(self._device), mask, [])
        self._sample(rows, logits)
        self._merge(rows, layers, mask)
        return self._drop_finished()

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Sample one more token for every row; return the requests that finished."""
        last = torch.tensor([[row.request.response_ids[-1]] for row in self._rows], device=self._device)
        self._mask = functional.pad(self._mask, (0, 1), value=1)
        logits, self._layers = self._forward(last, self._mask, self._layers)
        self._sample(self._rows, logits)
        return self._drop_finished()

    def _forward(
        self, ids: torch.Tensor, mask: torch.Tensor, layers: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        from transformers import DynamicCache

        cache = DynamicCache()
        for index, (keys, values) in enumerate(layers):
            cache.update(keys, values, index)
        positions = (mask.cumsum(-1) - 1).clamp_(min=0)[:, -ids.shape[1] :]
        out = self._model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        # Declared as layers of any kind, and empty ones; attention fills these.
        filled: list[Any] = cache.layers
        return out.logits[:, -1], [(layer.keys, layer.values) for layer in filled]

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

    def _merge(self, rows: list[_Row], layers: list[tuple[torch.Tensor, torch.Tensor]], mask: torch.Tensor) -> None:
        if self._rows:
            length = max(self._mask.shape[1], mask.shape[1])
            layers = [
                (_stack(old_keys, keys, length), _stack(old_values, values, length))
                for (old_keys, old_values), (keys, values) in zip(self._layers, layers, strict=True)
            ]
            old_mask = functional.pad(self._mask, (length - self._mask.shape[1], 0))
            mask = torch.cat([old_mask, functional.pad(mask, (length - mask.shape[1], 0))])
        self._rows = self._rows + rows
        self._layers, self._mask = layers, mask

    def _drop_finished(self) -> list[Request]:
        finished = [row.request for row in self._rows if row.request.finish_reason]
        if not finished:
            return []
        keep = [index for index, row in enumerate(self._rows) if not row.request.finish_reason]
        self._rows = [self._rows[index] for index in keep]
        if not keep:
            self._layers, self._mask = [], self._mask[:0, :0]
            return finished
        rows = torch.tensor(keep, device=self._device)
        mask = self._mask[rows]
        # Columns that only the departed rows used would be carried along for nothing.
        start = mask.shape[1] - int(mask.sum(-1).max())
        self._mask = mask[:, start:]
        self._layers = [(keys[rows, :, start:], values[rows, :, start:]) for keys, values in self._layers]
        return finished


def _stack(old: torch.Tensor, new: torch.Tensor, length: int) -> torch.Tensor:
    return torch.cat([functional.pad(states, (0, 0, length - states.shape[2], 0)) for states in (old, new)])
