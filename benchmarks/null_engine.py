"""An engine without a model: random tokens, with lengths and times from a distribution, so that all that it costs is ours."""

from __future__ import annotations

import heapq
import itertools
import time
from typing import Any

import numpy as np

from trial_ray.engines.admission import Request
from trial_ray.engines.batching import BatchingEngine
from trial_ray.engines.protocol import EnginePart, RequestBatch, ResponseBatch, prompt_digest
from trial_ray.engines.weights import Weights, WeightsChecksum, WeightShards, iter_weights
from trial_ray.errors import EngineError
from trial_ray.models.vocabulary import stop_token_ids, vocabulary_size


class NullEngine(BatchingEngine):
    """Answers each request with random tokens, as late as a model would that decodes all requests together, a token a step.

    The length of a response is geometric, cut at ``max_tokens``.

    Args:
        model_path: folder whose vocabulary and stop tokens count.
        max_model_len: most tokens of prompt and response together.
        dtype: of the weights that are sent.
        device: not used.
        mean_tokens: of a response, before it is cut.
        seconds_per_step: time of a step, after which responses may end and requests join.
    """

    def __init__(
        self,
        model_path: str,
        *,
        max_model_len: int,
        dtype: str | None = None,
        device: str | None = None,
        num_threads: int | None = None,
        mean_tokens: float = 24.0,
        seconds_per_step: float = 5e-3,
    ) -> None:
        super().__init__(max_model_len)
        self._model_path = model_path
        self._mean_tokens = mean_tokens
        self._seconds_per_step = seconds_per_step
        self._order = itertools.count()
        self._steps = 0
        self._next_step = 0.0
        self._due: list[tuple[int, int, Request]] = []
        self._num_exchanges = 0

    async def exchange(self, client: str, requests: RequestBatch) -> ResponseBatch:
        """As the base class does, counted."""
        self._num_exchanges += 1
        return await super().exchange(client, requests)

    async def report(self) -> dict[str, Any]:
        """As the base class does, with the number of calls of :meth:`exchange`."""
        return {**await super().report(), "exchanges": self._num_exchanges}

    def _open(self) -> dict[str, Any]:
        from transformers import AutoConfig

        stop_ids = stop_token_ids(self._model_path)
        self._info = {
            "engine": "null",
            "model": self._model_path,
            "vocab_size": vocabulary_size(AutoConfig.from_pretrained(self._model_path)),
            "stop_token_ids": stop_ids,
        }
        ordinary = np.setdiff1d(np.arange(self._info["vocab_size"], dtype=np.int32), stop_ids)
        self._ordinary, self._stop_id = ordinary, stop_ids[0]
        return self._info

    def _step(self, joining: list[Request]) -> list[Request]:
        for request in joining:
            self._answer(request)
            heapq.heappush(self._due, (self._steps + len(request.response_ids), next(self._order), request))
        self._steps += 1
        # A step that was late delays those after it, as a model's would.
        now = time.monotonic()
        self._next_step = max(now, self._next_step + self._seconds_per_step)
        time.sleep(self._next_step - now)
        finished: list[Request] = []
        while self._due and self._due[0][0] <= self._steps:
            finished.append(heapq.heappop(self._due)[2])
        return finished

    def _answer(self, request: Request) -> None:
        params = request.params
        seed = None if params.seed is None else (params.seed, prompt_digest(request.prompt_ids))
        rng = np.random.default_rng(seed)
        drawn = int(rng.geometric(1 / self._mean_tokens))
        length = min(drawn, params.max_tokens)
        request.response_ids = rng.choice(self._ordinary, length).tolist()
        request.logprobs = [-1.0] * length
        request.finish_reason = "length"
        if drawn <= params.max_tokens:
            request.response_ids[-1] = self._stop_id
            request.finish_reason = "stop"

    def _replace_weights(self, weights: Weights) -> tuple[str, str]:
        if not isinstance(weights, WeightShards):
            raise EngineError(f"the null engine takes weights from the object store, not by {weights.backend}")
        received = WeightsChecksum()
        for name, tensor in iter_weights(weights):
            received.add(name, tensor)
        return received.hexdigest, received.arrangement

    def _score(self, token_ids: np.ndarray) -> np.ndarray:
        assert self._text is not None
        return self._text.logprobs[: len(token_ids) - 1]

    def _sleep(self, level: int) -> None:
        """There is no memory to give."""

    def _wake(self, part: EnginePart) -> None:
        """There is no memory to take."""

    def _recover(self) -> None:
        self._due = []

    def _close(self) -> None:
        self._due = []
