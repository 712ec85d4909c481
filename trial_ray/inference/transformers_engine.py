"""The embedded engine: a transformers model with continuous batching, on whatever device torch has."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from trial_ray.errors import EngineError
from trial_ray.inference.admission import AdmissionGate, check_request
from trial_ray.inference.decoding_batch import DecodingBatch, Request
from trial_ray.inference.protocol import Completion, SamplingParams
from trial_ray.inference.stop_tokens import stop_token_ids
from trial_ray.inference.weights import WeightShards, iter_weights, weights_checksum


class TransformersEngine:
    """Ray actor class (made an actor by the pool) that answers to ``EngineProtocol``.

    Requests join the running batch between two tokens and leave it when their reply ends. The forward passes run in one thread
    of their own, so the actor keeps answering. A reply depends on its seed, prompt and weights; other rows of the batch touch it
    only through the rounding of batched matrix products.

    Args:
        model_path: folder in the Hugging Face format.
        dtype: torch name of the compute type.
        max_model_len: most tokens of prompt and reply together.
        device: torch device; ``None`` takes CUDA where there is one.
        max_batch: most rows decoded at a time; further requests wait.
        num_threads: torch's threads for the forward passes on the CPU; ``None`` leaves torch's own choice.
    """

    def __init__(
        self,
        model_path: str,
        *,
        dtype: str = "float32",
        max_model_len: int,
        device: str | None = None,
        max_batch: int = 64,
        num_threads: int | None = None,
    ) -> None:
        self._model_path = model_path
        self._dtype = dtype
        self._max_model_len = max_model_len
        self._device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._max_batch = max_batch
        self._num_threads = num_threads
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._gate = AdmissionGate()
        self._starting = asyncio.Lock()
        self._waiting: list[Request] = []
        self._loop_task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._model: Any = None
        self._info: dict[str, Any] = {}

    async def ready(self) -> dict[str, Any]:
        """Load the model and start the batching loop (idempotent); see ``EngineProtocol``."""
        async with self._starting:
            if self._loop_task is None:
                await self._in_thread(self._load_model)
                self._loop_task = asyncio.create_task(self._serve())
        return dict(self._info)

    async def generate(self, prompt_ids: np.ndarray, params: SamplingParams) -> Completion:
        """Sample one reply; see ``EngineProtocol``."""
        self._check_alive()
        check_request(prompt_ids, params, max_model_len=self._max_model_len, vocab_size=self._info["vocab_size"])
        async with self._gate.request() as version:
            request = Request(prompt_ids, params, asyncio.get_running_loop().create_future())
            self._waiting.append(request)
            self._wake.set()
            await request.reply
        return Completion(
            response_ids=np.asarray(request.response_ids, dtype=np.int32),
            logprobs=np.asarray(request.logprobs, dtype=np.float32),
            weight_version=version,
            finish_reason=request.finish_reason,
        )

    async def load_weights(self, shards: WeightShards, drain_timeout_s: float = 600.0) -> str:
        """Let replies under way finish, then replace the weights; see ``EngineProtocol``.

        Raises:
            EngineError: names or shapes differ from the model's, or the replies under way did not finish in time.
        """
        await self.ready()
        self._check_alive()
        async with self._gate.update(shards.version, drain_timeout_s=drain_timeout_s):
            return await self._in_thread(self._copy_weights, shards)

    async def weight_version(self) -> int:
        """Version now held; -1 before the first ``load_weights``."""
        return self._gate.version

    async def shutdown(self) -> None:
        """Stop the loop, fail what is still waiting, free the model."""
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.gather(self._loop_task, return_exceptions=True)
        self._fail(self._waiting, EngineError("the engine was shut down"))
        self._thread.shutdown(wait=True)
        self._model = None

    def _check_alive(self) -> None:
        if self._loop_task is None or self._loop_task.done() or self._model is None:
            raise EngineError("the transformers engine is not running; call ready first, or make a new engine")

    async def _in_thread(self, function: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def _load_model(self) -> None:
        from transformers import AutoModelForCausalLM

        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        model = AutoModelForCausalLM.from_pretrained(self._model_path, dtype=getattr(torch, self._dtype))
        self._model = model.to(self._device).eval()
        self._info = {
            "engine": "transformers",
            "model": self._model_path,
            "vocab_size": model.config.vocab_size,
            "stop_token_ids": stop_token_ids(self._model_path),
        }

    def _copy_weights(self, shards: WeightShards) -> str:
        held = dict(self._model.named_parameters())
        with torch.no_grad():
            for name, tensor in iter_weights(shards):
                parameter = held.pop(name, None)
                if parameter is None or parameter.shape != tensor.shape:
                    found = "no such parameter" if parameter is None else f"shape {tuple(parameter.shape)}"
                    raise EngineError(
                        f"weights: {name} of shape {tuple(tensor.shape)} was sent, the engine has {found}"
                    )
                parameter.copy_(tensor)
        if held:
            raise EngineError(f"weights: {sorted(held)} were not sent")
        return weights_checksum(self._model.named_parameters())

    async def _serve(self) -> None:
        batch = DecodingBatch(self._model, frozenset(self._info["stop_token_ids"]))
        while True:
            if not batch.requests and not self._waiting:
                self._wake.clear()
                await self._wake.wait()
                # Callers that arrive in the same breath share a prefill.
                await asyncio.sleep(0)
            self._waiting = [request for request in self._waiting if not request.reply.done()]
            room = self._max_batch - len(batch.requests)
            joining, self._waiting = self._waiting[:room], self._waiting[room:]
            try:
                finished = await self._in_thread(self._advance, batch, joining)
            except Exception as error:  # whatever the forward raises reaches the callers; the engine goes on
                failed = [*joining, *batch.requests]
                batch = DecodingBatch(self._model, frozenset(self._info["stop_token_ids"]))
                self._fail(failed, EngineError(f"the forward pass failed: {error!r}"))
                continue
            for request in finished:
                if not request.reply.done():
                    request.reply.set_result(None)

    @staticmethod
    def _advance(batch: DecodingBatch, joining: list[Request]) -> list[Request]:
        finished = batch.step() if batch.requests else []
        if joining:
            finished = finished + batch.admit(joining)
        return finished

    @staticmethod
    def _fail(requests: list[Request], error: EngineError) -> None:
        for request in requests:
            if not request.reply.done():
                request.reply.set_exception(error)
