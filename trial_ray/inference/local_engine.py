"""A model of this process as an engine for coroutines of this thread: no actor, no copy of the weights."""

from __future__ import annotations

import asyncio

import numpy as np
import torch

from trial_ray.inference.batching_engine import Request
from trial_ray.inference.decoding_batch import DecodingBatch
from trial_ray.inference.protocol import Response, SamplingParams


class LocalEngine:
    """Continuous batching with a live model; the requests of all coroutines that wait are decoded together.

    Args:
        model: a transformers causal language model in evaluation mode.
        stop_ids: tokens that end a response.
    """

    def __init__(self, model: torch.nn.Module, stop_ids: frozenset[int]) -> None:
        self._batch = DecodingBatch(model, stop_ids)
        self._joining: list[Request] = []
        self._done: dict[Request, asyncio.Future[None]] = {}
        self._decoding: asyncio.Task[None] | None = None

    async def generate(self, prompt_ids: np.ndarray, params: SamplingParams) -> Response:
        """Sample one response; a fixed seed in ``params`` gives the same one again, up to rounding in the batch."""
        request = Request(prompt_ids, params)
        self._done[request] = asyncio.get_running_loop().create_future()
        self._joining.append(request)
        if self._decoding is None:
            self._decoding = asyncio.create_task(self._decode())
        await self._done[request]
        return request.response(weight_version=0)

    async def _decode(self) -> None:
        try:
            while self._done:
                joining, self._joining = self._joining, []
                finished = self._batch.step() if len(self._batch) else []
                if joining:
                    finished += self._batch.admit(joining)
                for request in finished:
                    self._done.pop(request).set_result(None)
                await asyncio.sleep(0)  # whoever was answered acts and asks again before the next token
        except Exception as error:  # every coroutine that waits hears of it
            failed, self._done, self._joining = self._done, {}, []
            for done in failed.values():
                done.set_exception(error)
        finally:
            self._decoding = None
