"""The embedded engine: a transformers model with continuous batching, on whatever device torch has."""

from __future__ import annotations

from typing import Any

import torch

from trial_ray.errors import EngineError
from trial_ray.inference.batch_limit import free_memory, rows_that_fit
from trial_ray.inference.batching_engine import BatchingEngine, Request
from trial_ray.inference.decoding_batch import DecodingBatch
from trial_ray.inference.engine_arguments import check_positions, engine_dtype
from trial_ray.inference.protocol import EnginePart
from trial_ray.inference.sampling import stop_token_ids
from trial_ray.inference.weights import Weights, WeightsChecksum, WeightShards, iter_weights

JOINING_SHARE = 2 / 3
"""Requests join together once they are so large a share of the rows that run, ..."""
MOST_STEPS_WAITED = 6
"""... or after so many steps, in tokens of the others."""


class TransformersEngine(BatchingEngine):
    """Ray actor class (made an actor by the pool) around ``AutoModelForCausalLM``.

    Requests join the running batch between two tokens and leave it when their response ends. A response depends on its seed,
    prompt and weights; other rows of the batch touch it only through the rounding of batched matrix products.

    Args:
        model_path: folder in the Hugging Face format.
        dtype: torch name of the compute type; ``None`` takes bfloat16 on CUDA and float32 elsewhere.
        max_model_len: most tokens of prompt and response together.
        device: torch device; ``None`` takes CUDA where there is one.
        max_batch: most rows decoded at a time; further requests wait. ``None``: as many as fit into free memory, up to 256.
        num_threads: torch's threads for the forward passes on the CPU; ``None`` leaves torch's own choice.
    """

    def __init__(
        self,
        model_path: str,
        *,
        dtype: str | None = None,
        max_model_len: int,
        device: str | None = None,
        max_batch: int | None = None,
        num_threads: int | None = None,
    ) -> None:
        super().__init__(max_model_len)
        self._model_path = model_path
        self._device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._dtype = engine_dtype(dtype, on_gpu=self._device.startswith("cuda"))
        self._max_batch = max_batch
        self._num_threads = num_threads
        self._waiting: list[Request] = []
        self._shapes: list[torch.Size] = []  # of parameters whose values were dropped
        self._steps_waited = 0

    def _open(self) -> dict[str, Any]:
        from transformers import AutoModelForCausalLM

        check_positions(self._model_path, self._max_model_len)
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        model = AutoModelForCausalLM.from_pretrained(self._model_path, dtype=getattr(torch, self._dtype))
        model.to(self._device)  # type: ignore[arg-type]  # transformers wraps Module.to without its arguments' types
        self._model = model.eval()
        self._stop_ids = stop_token_ids(self._model_path)
        self._room = self._max_batch or rows_that_fit(
            model.config, self._max_model_len, model.dtype, free_memory(model.device)
        )
        self._recover()
        return {
            "engine": "transformers",
            "model": self._model_path,
            "vocab_size": model.config.vocab_size,
            "stop_token_ids": self._stop_ids,
        }

    def _step(self, joining: list[Request]) -> list[Request]:
        self._waiting += joining
        finished = self._batch.step() if len(self._batch) else []
        if admitted := self._take_waiting():
            finished += self._batch.admit(admitted)
        return finished

    def _take_waiting(self) -> list[Request]:
        """Requests to prefill now; few wait for more, because a forward pass costs little more for many."""
        room = self._room - len(self._batch)
        few = len(self._waiting) < JOINING_SHARE * len(self._batch)
        if not room or not self._waiting or (few and self._steps_waited < MOST_STEPS_WAITED):
            self._steps_waited += bool(self._waiting)
            return []
        self._steps_waited = 0
        taken, self._waiting = self._waiting[:room], self._waiting[room:]
        return taken

    def _replace_weights(self, weights: Weights) -> tuple[str, str]:
        if not isinstance(weights, WeightShards):
            raise EngineError(f"the transformers engine takes weights from the object store, not by {weights.backend}")
        self._recover()  # nothing that other weights computed is there when these serve
        missing = dict(self._model.named_parameters())
        with torch.no_grad():
            for name, tensor in iter_weights(weights):
                parameter = missing.pop(name, None)
                if parameter is None or parameter.shape != tensor.shape:
                    found = "no such parameter" if parameter is None else f"shape {tuple(parameter.shape)}"
                    raise EngineError(
                        f"weights: {name} of shape {tuple(tensor.shape)} was sent, the engine has {found}"
                    )
                parameter.copy_(tensor)
        if missing:
            raise EngineError(f"weights: {sorted(missing)} were not sent")
        held = WeightsChecksum()
        for name, parameter in self._model.named_parameters():
            held.add(name, parameter)
        return held.hexdigest, held.arrangement

    def _sleep(self, level: int) -> None:
        del self._batch
        if level == 1:
            self._model.to("cpu")
        else:
            self._shapes = [parameter.shape for parameter in self._model.parameters()]
            for parameter in self._model.parameters():
                parameter.data = parameter.data.new_empty(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _wake(self, part: EnginePart) -> None:
        if part == "cache":
            self._recover()
            return
        self._model.to(self._device)
        if self._shapes:
            for parameter, shape in zip(self._model.parameters(), self._shapes, strict=True):
                parameter.data = parameter.data.new_empty(shape)
            self._shapes = []

    def _recover(self) -> None:
        self._waiting = []
        self._batch = DecodingBatch(self._model, frozenset(self._stop_ids), max_rows=self._room)

    def _close(self) -> None:
        del self._model
        self.__dict__.pop("_batch", None)  # an engine that sleeps has none
