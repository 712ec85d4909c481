"""A model of this process as an engine for coroutines of this thread: no actor, no copy of the weights."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np

from trial_ray.engines.admission import Request, check_request
from trial_ray.engines.protocol import Response, SamplingParams
from trial_ray.engines.transformers import make_batch, try_cache
from trial_ray.models.model_shape import max_positions
from trial_ray.models.vocabulary import vocabulary_size

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TRIED_LENGTH = 64
"""Tokens of the row on which it is tried whether the model decodes with a cache."""


class LocalEngine:
    """Continuous batching with a live model; the requests of all coroutines that wait are decoded together.

    Args:
        model: a transformers causal language model in evaluation mode.
        stop_ids: tokens that end a response.
    """

    def __init__(self, model: PreTrainedModel, stop_ids: frozenset[int]) -> None:
        self._model = model
        self._stop_ids = stop_ids
        self._cached = try_cache(model, min(max_positions(model.config) or TRIED_LENGTH, TRIED_LENGTH)) is not None
        self._joining: list[Request] = []
        self._done: dict[Request, asyncio.Future[None]] = {}
        self._decoding: asyncio.Task[None] | None = None

    async def generate(self, prompt_ids: np.ndarray, params: SamplingParams) -> Response:
        """Sample one response; a fixed seed in ``params`` gives the same one again, up to rounding in the batch.

        Raises:
            InvalidRequestError: the request itself is wrong.
            EngineError: the model gives no probabilities after this prompt.
        """
        config = self._model.config
        check_request(
            prompt_ids,
            params,
            max_model_len=max_positions(config),
            vocab_size=vocabulary_size(config),
        )
        request = Request(prompt_ids, params)
        done = self._done[request] = asyncio.get_running_loop().create_future()
        self._joining.append(request)
        if self._decoding is None:
            self._decoding = asyncio.create_task(self._decode())
        try:
            await done
        finally:
            self._done.pop(request, None)  # else it was cancelled, and takes no further part
            request.finish_reason = request.finish_reason or "cancelled"
        return request.response(weight_version=0)

    async def _decode(self) -> None:
        batch = make_batch(
            self._model, self._stop_ids, cached=self._cached
        )  # nothing is left of an earlier one, whatever ended it
        try:
            while self._done:
                joining, self._joining = [request for request in self._joining if request in self._done], []
                finished = batch.step() if len(batch) else []
                if joining:
                    finished += batch.admit(joining)
                for request in finished:
                    if (done := self._done.get(request)) and not done.done():
                        done.set_result(None)
                await asyncio.sleep(0)  # coroutines that were answered act and ask again before the next token
        except Exception as error:  # every coroutine that waits hears of it
            for done in self._done.values():
                if not done.done():
                    done.set_exception(error)
        finally:
            self._decoding = None
