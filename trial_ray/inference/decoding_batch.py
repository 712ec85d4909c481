"""The running batch of the transformers engine: rows join after their prefill and leave when their reply ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from trial_ray.inference.protocol import SamplingParams
from trial_ray.inference.sampling import sample_tokens


@dataclass(eq=False)
class Request:
    """One reply in the making.

    Attributes:
        prompt_ids: int ``[P]``.
        params: how to sample.
        reply: where the finished reply goes (an ``asyncio.Future`` in the engine).
        response_ids: tokens sampled so far, with ``logprobs`` beside them.
        finish_reason: ``""`` while it runs.
    """

    prompt_ids: np.ndarray
    params: SamplingParams
    reply: Any
    response_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""

    def __post_init__(self) -> None:
        self.random = Random(self.params.seed)

    def take(self, token: int, logprob: float, stop_ids: frozenset[int]) -> None:
        """Append one sampled token and note whether it ends the reply."""
        self.response_ids.append(token)
        self.logprobs.append(logprob)
        if token in stop_ids:
            self.finish_reason = "stop"
        elif len(self.response_ids) >= self.params.max_tokens:
            self.finish_reason = "length"


class DecodingBatch:
    """Rows of unequal length in one left-padded key-value cache.

    Args:
        model: a transformers causal language model in evaluation mode.
        stop_ids: tokens that end a reply.
    """

    def __init__(self, model: torch.nn.Module, stop_ids: frozenset[int]) -> None:
        self._model = model
        self._stop_ids = stop_ids
        self._device = next(model.parameters()).device
        self.requests: list[Request] = []
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []  # keys and values, each [B, heads, L, width]
        self._mask = torch.zeros(0, 0, dtype=torch.long, device=self._device)  # [B, L]

    @torch.inference_mode()
    def admit(self, requests: list[Request]) -> list[Request]:
        """Prefill new rows and sample their first token; return those that are already finished."""
        longest = max(len(request.prompt_ids) for request in requests)
        ids = torch.zeros(len(requests), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            ids[row, longest - len(request.prompt_ids) :] = torch.as_tensor(request.prompt_ids, dtype=torch.long)
            mask[row, longest - len(request.prompt_ids) :] = 1
        mask = mask.to(self._device)
        logits, layers = self._forward(ids.to(self._device), mask, [])
        self._sample(requests, logits)
        self._merge(requests, layers, mask)
        return self._drop_finished()

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Sample one more token for every row; return the requests that finished."""
        last = torch.tensor([[request.response_ids[-1]] for request in self.requests], device=self._device)
        self._mask = functional.pad(self._mask, (0, 1), value=1)
        logits, self._layers = self._forward(last, self._mask, self._layers)
        self._sample(self.requests, logits)
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
        return out.logits[:, -1], [(layer.keys, layer.values) for layer in cache.layers]

    def _sample(self, requests: list[Request], logits: torch.Tensor) -> None:
        params = [request.params for request in requests]
        tokens, logprobs = sample_tokens(
            logits,
            torch.tensor([p.temperature for p in params], device=self._device),
            torch.tensor([p.top_p for p in params], device=self._device),
            torch.tensor([r.random.random() for r in requests], dtype=torch.float64, device=self._device),
        )
        for request, token, logprob in zip(requests, tokens.tolist(), logprobs.tolist(), strict=True):
            request.take(token, logprob, self._stop_ids)

    def _merge(
        self, requests: list[Request], layers: list[tuple[torch.Tensor, torch.Tensor]], mask: torch.Tensor
    ) -> None:
        if self.requests:
            length = max(self._mask.shape[1], mask.shape[1])
            layers = [
                (
                    torch.cat([_left_pad(old[0], length), _left_pad(new[0], length)]),
                    torch.cat([_left_pad(old[1], length), _left_pad(new[1], length)]),
                )
                for old, new in zip(self._layers, layers, strict=True)
            ]
            old_mask = functional.pad(self._mask, (length - self._mask.shape[1], 0))
            mask = torch.cat([old_mask, functional.pad(mask, (length - mask.shape[1], 0))])
        self.requests = self.requests + requests
        self._layers, self._mask = layers, mask

    def _drop_finished(self) -> list[Request]:
        finished = [request for request in self.requests if request.finish_reason]
        if not finished:
            return []
        keep = [row for row, request in enumerate(self.requests) if not request.finish_reason]
        self.requests = [self.requests[row] for row in keep]
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


def _left_pad(states: torch.Tensor, length: int) -> torch.Tensor:
    return functional.pad(states, (0, 0, length - states.shape[2], 0))
