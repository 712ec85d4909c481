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
        self._decoding: asyncio.Task[None] | None = None

    async def generate(self, prompt_ids: np.ndarray, params: SamplingParams) -> Response:
        """Sample one response; a fixed seed in ``params`` gives the same one again, up to rounding in the batch."""
        request = Request(prompt_ids, params, asyncio.get_running_loop().create_future())
        self._joining.append(request)
        if self._decoding is None:
            self._decoding = asyncio.create_task(self._decode())
        await request.done
        ids, logprobs = np.asarray(request.response_ids, np.int32), np.asarray(request.logprobs, np.float32)
        return Response(ids, logprobs, weight_version=0, finish_reason=request.finish_reason)

    async def _decode(self) -> None:
        waiting: list[Request] = []
        try:
            while self._joining or len(self._batch):
                joining, self._joining = self._joining, []
                waiting = [request for request in (*waiting, *joining) if not request.finish_reason]
                finished = self._batch.step() if len(self._batch) else []
                if joining:
                    finished += self._batch.admit(joining)
                for request in finished:
                    request.done.set_result(None)
                await asyncio.sleep(0)  # whoever was answered acts and asks again before the next token
        except Exception as error:  # every coroutine that waits hears of it
            for request in (*waiting, *self._joining):
                if not request.done.done():
                    request.done.set_exception(error)
        finally:
            self._decoding = None
