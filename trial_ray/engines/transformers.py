"""Transformers engines: an actor with its own model, and an engine for a model of this process."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Collection
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import psutil
import torch

from trial_ray.engines.actor import EngineActor
from trial_ray.engines.decoding import Batch
from trial_ray.engines.protocol import (
    FLOAT32_GAP,
    LOW_PRECISION_GAP,
    EnginePart,
    InvalidRequestError,
    Request,
    Response,
    SamplingParams,
    check_request,
)
from trial_ray.engines.settings import MAX_ROWS, MEMORY_SHARE, SLACK, check_positions, engine_dtype
from trial_ray.engines.weights import Weights, WeightsChecksum, iter_weights, own_logprobs
from trial_ray.errors import ConfigError, EngineError
from trial_ray.files import Json
from trial_ray.models.loading import load_tokenizer
from trial_ray.models.model_shape import max_positions, stop_token_ids, vocabulary_size
from trial_ray.models.tensors import stored_tensors
from trial_ray.ray_internals import container_memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

TEST_TOKENS = 6
"""Maximum number of response tokens that :func:`try_cache` samples for each prompt."""


def try_cache(model: PreTrainedModel, longest: int) -> int | None:
    """Test a model with the cache of a :class:`Batch`; return the cache's bytes per token, or ``None`` if the model cannot use it.

    State-space and other recurrent layers do not keep keys and values of single tokens, and rotary frequencies may depend on the
    longest row of a batch. The test therefore decodes a long and a short random row, and compares their log-probabilities with
    those of the model's own forward pass over each row.

    Args:
        model: causal language model in evaluation mode.
        longest: maximum number of tokens in a row.

    Raises:
        ConfigError: the model's own log-probabilities depend on earlier forward passes.
    """
    random = np.random.default_rng(0)
    max_tokens = max(1, min(TEST_TOKENS, longest // 4))
    lengths = 1, longest - max_tokens
    prompts = [random.integers(0, vocabulary_size(model.config), length, np.int32) for length in lengths]
    shorter = prompts[1][: max(2, longest * 3 // 4)]
    before = own_logprobs(model, shorter, 1)
    failure, gap = "", math.nan
    try:
        token_bytes, gap = _gap_with_cache(model, prompts, max_tokens)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # A model that does not support DecodingCache may raise an error of any type.
        failure = f": {error!r}"
        own_logprobs(model, prompts[1], 1)
    limit = FLOAT32_GAP if model.dtype.itemsize > 2 else LOW_PRECISION_GAP
    if abs(own_logprobs(model, shorter, 1) - before).max() > limit:
        raise ConfigError(
            f"{type(model).__name__} computes other log-probabilities for the same tokens after a longer row, so processes would "
            f"disagree on its policy. Keep max_prompt_tokens + max_response_tokens, {longest} now, within the length that the "
            "model was trained for, or choose another model."
        )
    if not failure and not gap > limit:  # Accept a gap of NaN: each request with NaN log-probabilities fails later.
        return token_bytes
    logger.warning(
        "%s cannot decode with a cache of keys and values, so every token is computed from its whole context, which is slow; "
        "engine='vllm' may have a cache for it%s",
        type(model).__name__,
        failure,
    )
    return None


def _gap_with_cache(model: PreTrainedModel, prompts: list[np.ndarray], max_tokens: int) -> tuple[int, float]:
    """Return the cache's bytes per token, and the mean difference in nats of log-probabilities with and without the cache."""
    requests = [Request(prompt, SamplingParams(max_tokens, seed=0)) for prompt in prompts]
    batch = Batch(model, frozenset())
    for request in requests:
        batch.admit([request])
    while len(batch):
        batch.step()
    gaps = []
    for request in requests:
        row = np.array([*request.prompt_ids, *request.response_ids], np.int32)
        gaps.append(np.abs(own_logprobs(model, row, len(request.response_ids)) - request.logprobs))
    assert batch.cache is not None
    return batch.cache.token_bytes, float(np.concatenate(gaps).mean())


def rows_that_fit(token_bytes: int, max_model_len: int, free_bytes: int) -> int:
    """Return how many full-length rows fit into :data:`MEMORY_SHARE` of the free memory, at most :data:`MAX_ROWS`.

    Args:
        token_bytes: bytes of the keys and values of one token over all layers.
        max_model_len: maximum number of tokens in a row.
        free_bytes: free memory in bytes.

    Raises:
        EngineError: not even one row fits.
    """
    row_bytes = int(max_model_len * token_bytes * (1 + 2 / SLACK))
    rows = int(free_bytes * MEMORY_SHARE) // row_bytes
    if rows < 1:
        raise EngineError(
            f"max_model_len is {max_model_len}: one row takes {row_bytes / 2**20:.0f} MiB, more than {MEMORY_SHARE:.0%} of "
            f"the free memory, {free_bytes / 2**20:.0f} MiB. Lower max_prompt_tokens or max_response_tokens, free memory, or "
            "set max_batch=1 to try anyway."
        )
    return min(rows, MAX_ROWS)


def free_memory(device: torch.device) -> int:
    """Return the free memory in bytes of a CUDA device, or of this machine within the limit of its container."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(int(psutil.virtual_memory().available), container_memory())


JOINING_SHARE = 2 / 3
"""Waiting requests join the batch together once they are at least this share of the running rows."""
MAX_JOIN_DELAY = 6
"""Maximum number of decoding steps that a request waits for further requests to join the batch with it."""


class TransformersEngine(EngineActor):
    """Engine around ``AutoModelForCausalLM``; the pool makes Ray actors of this class.

    Requests join the running batch between two tokens and leave it when their response ends. A response depends on its seed,
    prompt and weights; other rows of the batch affect it only through the rounding of batched matrix products.

    Args:
        model_path: folder in the Hugging Face format.
        dtype: torch name of the compute type; ``None`` takes bfloat16 on CUDA and float32 elsewhere.
        max_model_len: maximum number of tokens of prompt and response together.
        device: torch device; ``None`` takes CUDA if available.
        max_batch: maximum number of rows decoded at a time; further requests wait. ``None`` takes the number of rows that fit
            into free memory, up to 256.
        num_threads: torch threads for forward passes on the CPU; ``None`` keeps torch's default.
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
        self._shapes: list[torch.Size] = []  # Shapes of the parameters while sleep has dropped their values.
        self._join_delay = 0

    def _open(self) -> Json:
        from transformers import AutoModelForCausalLM

        check_positions(self._model_path, self._max_model_len)
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        model = AutoModelForCausalLM.from_pretrained(
            self._model_path, dtype=getattr(torch, self._dtype), trust_remote_code=False
        )
        model.to(self._device)  # type: ignore[arg-type]  # Module.to has no argument types in transformers.
        self._model = model.eval()
        self._stop_ids = stop_token_ids(self._model_path)
        token_bytes = try_cache(model, self._max_model_len)
        self._cached, self._room = token_bytes is not None, self._max_batch or MAX_ROWS
        if token_bytes is not None and not self._max_batch:
            self._room = rows_that_fit(token_bytes, self._max_model_len, free_memory(model.device))
        self._recover()
        return {"engine": "transformers", "vocab_size": vocabulary_size(model.config)}

    def _step(self, joining: list[Request]) -> list[Request]:
        self._waiting += joining
        finished = self._batch.step()
        if admitted := self._pop_joining():
            finished += self._batch.admit(admitted)
        self._batch_size = len(self._batch) + len(finished)
        return finished

    def _pop_joining(self) -> list[Request]:
        """Remove and return the waiting requests that are prefilled now.

        If few requests are waiting, they join up to :data:`MAX_JOIN_DELAY` steps later, together with others, because prefilling
        several requests in one forward pass costs little more than prefilling one.
        """
        room = self._room - len(self._batch)
        few = len(self._waiting) < JOINING_SHARE * len(self._batch)
        if not room or not self._waiting or (few and self._join_delay < MAX_JOIN_DELAY):
            self._join_delay += bool(self._waiting)
            return []
        self._join_delay = 0
        joining, self._waiting = self._waiting[:room], self._waiting[room:]
        return joining

    def _abort(self, requests: Collection[Request]) -> None:
        self._waiting = [request for request in self._waiting if request not in requests]
        self._batch.abort(requests)

    def _replace_weights(self, weights: Weights) -> tuple[str, str]:
        if weights.backend != "object_store":
            raise EngineError(f"The transformers engine loads weights from the object store, not by {weights.backend}.")
        self._recover()  # Drop the cache, which was computed with the old weights.
        tensors = stored_tensors(self._model)
        missing = dict(tensors)
        for name, sent in iter_weights(weights):
            tensor = missing.pop(name, None)
            if tensor is None or tensor.shape != sent.shape:
                expected = "no such tensor" if tensor is None else f"shape {tuple(tensor.shape)}"
                raise EngineError(f"weights: got {name} of shape {tuple(sent.shape)}, the engine has {expected}.")
            if not isinstance(tensor, torch.nn.Parameter):  # Buffers take the dtype in which they were sent.
                tensor.data = tensor.data.to(sent.dtype)
            tensor.data.copy_(sent)
        if missing:
            raise EngineError(f"weights: {sorted(missing)} were not sent.")
        checksum = WeightsChecksum(tensors.items())
        return checksum.hexdigest, checksum.arrangement

    def _score(self, token_ids: np.ndarray) -> np.ndarray:
        return own_logprobs(self._model, token_ids)

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
        self._batch = Batch(
            self._model, frozenset(self._stop_ids), cached=self._cached, max_rows=self._room, decode=self._decode
        )

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self._model_path)

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _close(self) -> None:
        del self._model
        self.__dict__.pop("_batch", None)  # A sleeping engine has no batch.


TEST_LENGTH = 64
"""Maximum length in tokens of the rows with which :class:`LocalEngine` tests whether a model can decode with a cache."""


class LocalEngine:
    """Engine without an actor, for a model in this process; generation requests of all coroutines are decoded together.

    Args:
        model: a transformers causal language model in evaluation mode.
        stop_ids: tokens that end a response.
    """

    def __init__(self, model: PreTrainedModel, stop_ids: frozenset[int]) -> None:
        self._model = model
        self._stop_ids = stop_ids
        self._cached = try_cache(model, min(max_positions(model.config) or TEST_LENGTH, TEST_LENGTH)) is not None
        self._done: dict[Request, asyncio.Future[None]] = {}
        self._decoding: asyncio.Task[None] | None = None

    async def generate(self, prompt_ids: np.ndarray, params: SamplingParams) -> Response:
        """Sample one response; a fixed seed in ``params`` makes it repeatable, up to rounding in the batch.

        Raises:
            InvalidRequestError: the request itself is invalid.
            EngineError: the model's log-probabilities after this prompt are not finite.
        """
        config = self._model.config
        check_request(prompt_ids, params, max_model_len=max_positions(config), vocab_size=vocabulary_size(config))
        if params.stop:
            raise InvalidRequestError(f"stop: expected (), because this engine reads no text, got {params.stop!r:.80}.")
        request = Request(prompt_ids, params)
        done = self._done[request] = asyncio.get_running_loop().create_future()
        if self._decoding is None:
            self._decoding = asyncio.create_task(self._decode())
        try:
            await done
        finally:
            self._done.pop(request, None)
            request.finish_reason = request.finish_reason or "aborted"
        return request.response()

    async def _decode(self) -> None:
        # Start with an empty batch: an earlier one may have ended in an error.
        batch = Batch(self._model, self._stop_ids, cached=self._cached)
        try:
            while self._done:
                joining = [request for request in self._done if not request.response_ids]
                finished = batch.step()
                if joining:
                    finished += batch.admit(joining)
                for request in finished:
                    if (done := self._done.get(request)) and not done.done():
                        done.set_result(None)
                # Let the coroutines whose requests were answered send their next requests before the next decoding step.
                await asyncio.sleep(0)
        except Exception as error:  # All waiting coroutines receive the error, whatever its type.
            for done in self._done.values():
                if not done.done():
                    done.set_exception(error)
        finally:
            self._decoding = None
