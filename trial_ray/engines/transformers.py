"""The transformers engine: sampling, one decoding step for all rows, and the actor around them."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Sequence
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trial_ray.engines.admission import Request
from trial_ray.engines.agreement import own_logprobs
from trial_ray.engines.arguments import MOST_ROWS, PREFILL_TOKENS, check_positions, engine_dtype
from trial_ray.engines.batching import BatchingEngine
from trial_ray.engines.decoding_cache import DecodingCache, free_memory, rows_that_fit
from trial_ray.engines.protocol import FLOAT32_GAP, LOW_PRECISION_GAP, EnginePart, SamplingParams
from trial_ray.engines.weights import Weights, WeightsChecksum, WeightShards, iter_weights
from trial_ray.errors import ConfigError, EngineError
from trial_ray.models.tensors import stored_tensors
from trial_ray.models.vocabulary import stop_token_ids, vocabulary_size

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


def sample_tokens(
    logits: torch.Tensor, temperatures: torch.Tensor, top_ps: torch.Tensor, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the next token of every row of a batch by inverting its cumulative distribution, independently of other rows.

    Args:
        logits: ``[B, V]``.
        temperatures: ``[B]``; 0 takes the most probable token.
        top_ps: ``[B]`` in (0, 1]: the smallest set of most probable tokens whose mass reaches it.
        uniforms: float64 ``[B]`` in [0, 1), one draw per row.

    Returns:
        Token ids int64 ``[B]`` and their log-probabilities float32 ``[B]``, in nats, under the distribution that each was
        drawn from: ``logits / temperature``, renormalised over the nucleus. A greedy row's are those of the model as it
        is: the distribution that it was drawn from has only one token.
    """
    greedy = temperatures <= 0
    # float64: a cumulative sum over a large vocabulary in float32 would drift by more than a rare token's mass.
    scaled = logits.double() / torch.where(greedy, 1.0, temperatures)[:, None]
    if bool((top_ps < 1).any()):
        scaled = _keep_nucleus(scaled, torch.where(greedy, 1.0, top_ps))
    logprobs = torch.log_softmax(scaled, dim=-1)
    cumulative = logprobs.exp().cumsum(-1)
    drawn = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1])[:, None], right=True).squeeze(-1)
    # Rounding can put the draw on or past the last bound.
    drawn = drawn.clamp_(max=logits.shape[-1] - 1)
    tokens = torch.where(greedy, logits.argmax(-1), drawn)
    return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1).float()


def _keep_nucleus(logits: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    """Put every logit outside the nucleus to minus infinity."""
    ordered, index = logits.sort(dim=-1, descending=True)
    probs = torch.softmax(ordered, dim=-1)
    # A token stays while the mass before it is still short of top_p; the first always stays.
    outside = probs.cumsum(-1) - probs >= top_ps[:, None]
    outside[:, 0] = False
    return torch.empty_like(logits).scatter(-1, index, ordered.masked_fill(outside, -torch.inf))


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


class Batch(ABC):
    """Rows of unequal length, decoded together; a row leaves when its response has ended.

    Args:
        model: a transformers causal language model in evaluation mode.
        stop_ids: tokens that end a response.
    """

    def __init__(self, model: torch.nn.Module, stop_ids: frozenset[int]) -> None:
        self._model = model
        self._stop_ids = stop_ids
        self._device = next(model.parameters()).device
        self._rows: list[_Row] = []

    def __len__(self) -> int:
        return len(self._rows)

    @abstractmethod
    def admit(self, requests: list[Request]) -> list[Request]:
        """Take in new rows and sample their first token; return those that are already finished."""

    @abstractmethod
    def step(self) -> list[Request]:
        """Sample one more token for every row; return the requests that finished."""

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


class DecodingBatch(Batch):
    """A batch with a cache, for models of which :func:`try_cache` says so.

    Args:
        model: as in :class:`Batch`.
        stop_ids: the same.
        max_rows: most rows that will ever run together, where that is known; memory is not taken for more.
    """

    def __init__(self, model: torch.nn.Module, stop_ids: frozenset[int], max_rows: int | None = None) -> None:
        super().__init__(model, stop_ids)
        self._cache = DecodingCache(max_rows)

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of one token over all layers, once a row was admitted."""
        return self._cache.token_bytes

    @torch.inference_mode()
    def admit(self, requests: list[Request]) -> list[Request]:
        """Prefill new rows."""
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
        """Compute one column."""
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

    def _drop_finished(self) -> list[Request]:
        finished = [index for index, row in enumerate(self._rows) if row.request.finish_reason]
        requests = [self._rows[index].request for index in finished]
        if finished:
            for source, target in self._cache.drop_rows(finished):
                self._rows[target] = self._rows[source]
            del self._rows[len(self._rows) - len(finished) :]
        return requests


class RecomputingBatch(Batch):
    """A batch without a cache: every token costs a forward pass over the whole row, which rows of the same length share."""

    def admit(self, requests: list[Request]) -> list[Request]:
        """Compute the prompts."""
        rows = [_Row(request) for request in requests]
        self._rows += rows
        return self._advance(rows)

    def step(self) -> list[Request]:
        """Compute all rows again."""
        return self._advance(self._rows)

    @torch.inference_mode()
    def _advance(self, rows: list[_Row]) -> list[Request]:
        by_length: dict[int, list[_Row]] = defaultdict(list)
        for row in rows:
            by_length[len(row.request.prompt_ids) + len(row.request.response_ids)].append(row)
        for length, equal in by_length.items():
            size = max(1, PREFILL_TOKENS // length)
            for part in (equal[first : first + size] for first in range(0, len(equal), size)):
                ids = np.array([[*row.request.prompt_ids, *row.request.response_ids] for row in part])
                inputs = torch.from_numpy(ids).to(self._device)
                self._sample(part, self._model(input_ids=inputs, use_cache=False, logits_to_keep=1).logits[:, -1])
        finished = [row.request for row in self._rows if row.request.finish_reason]
        self._rows = [row for row in self._rows if not row.request.finish_reason]
        return finished


TRIED_TOKENS = 6
"""Tokens of a response when the cache is tried."""


def try_cache(model: PreTrainedModel, longest: int) -> int | None:
    """Bytes of a token in the cache of a :class:`DecodingBatch`; ``None`` where it gives other log-probabilities than the model.

    State-space and other recurrent layers keep no keys and values of single tokens, and rotary frequencies may follow the longest
    row of a batch: it is measured, on a long and a short random row, against the model's own forward pass over each alone.

    Args:
        model: in evaluation mode.
        longest: most tokens of a row.

    Raises:
        ConfigError: the model's own log-probabilities depend on what it computed before.
    """
    random = np.random.default_rng(0)
    most = max(1, min(TRIED_TOKENS, longest // 4))
    prompts = [random.integers(0, vocabulary_size(model.config), length, np.int32) for length in (1, longest - most)]
    shorter = prompts[1][: max(2, longest * 3 // 4)]
    before = own_logprobs(model, shorter, 1)
    failure, gap = "", math.nan
    try:
        token_bytes, gap = _gap_with_cache(model, prompts, most)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever the model's code makes of a cache that it does not expect
        failure = f": {error!r}"
        own_logprobs(model, prompts[1], 1)
    limit = FLOAT32_GAP if model.dtype.itemsize > 2 else LOW_PRECISION_GAP
    if abs(own_logprobs(model, shorter, 1) - before).max() > limit:
        raise ConfigError(
            f"{type(model).__name__} gives other log-probabilities for the same tokens after a longer row was computed, so that "
            f"no two processes agree on its policy. Keep max_prompt_tokens + max_response_tokens, {longest} now, within the "
            "length that it was trained for, or choose another model."
        )
    if not failure and not gap > limit:  # log-probabilities that are no numbers are found elsewhere
        return token_bytes
    logger.warning(
        "%s cannot decode with a cache of keys and values, so every token is computed from its whole context, which is slow; "
        "engine='vllm' may have a cache for it%s",
        type(model).__name__,
        failure,
    )
    return None


def _gap_with_cache(model: PreTrainedModel, prompts: list[np.ndarray], most: int) -> tuple[int, float]:
    """Bytes of a token in the cache, and by how many nats responses that are sampled with it differ from the model's own."""
    requests = [Request(prompt, SamplingParams(most, seed=0)) for prompt in prompts]
    batch = DecodingBatch(model, frozenset())
    for request in requests:
        batch.admit([request])
    while len(batch):
        batch.step()
    gaps = []
    for request in requests:
        row = np.array([*request.prompt_ids, *request.response_ids], np.int32)
        gaps.append(np.abs(own_logprobs(model, row, len(request.response_ids)) - request.logprobs))
    return batch.token_bytes, float(np.concatenate(gaps).mean())


def make_batch(model: PreTrainedModel, stop_ids: frozenset[int], *, cached: bool, max_rows: int | None = None) -> Batch:
    """An empty batch, with a cache or without."""
    return DecodingBatch(model, stop_ids, max_rows) if cached else RecomputingBatch(model, stop_ids)


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
        model = AutoModelForCausalLM.from_pretrained(
            self._model_path, dtype=getattr(torch, self._dtype), trust_remote_code=False
        )
        model.to(self._device)  # type: ignore[arg-type]  # transformers wraps Module.to without its arguments' types
        self._model = model.eval()
        self._stop_ids = stop_token_ids(self._model_path)
        token_bytes = try_cache(model, self._max_model_len)
        self._cached, self._room = token_bytes is not None, self._max_batch or MOST_ROWS
        if token_bytes is not None and not self._max_batch:
            self._room = rows_that_fit(token_bytes, self._max_model_len, free_memory(model.device))
        self._recover()
        return {
            "engine": "transformers",
            "model": self._model_path,
            "vocab_size": vocabulary_size(model.config),
            "stop_token_ids": self._stop_ids,
        }

    def _step(self, joining: list[Request]) -> list[Request]:
        self._waiting += joining
        finished = self._batch.step() if len(self._batch) else []
        if admitted := self._take_waiting():
            finished += self._batch.admit(admitted)
        self._batch_size = len(self._batch) + len(finished)
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
        held = stored_tensors(self._model)
        missing = dict(held)
        for name, sent in iter_weights(weights):
            tensor = missing.pop(name, None)
            if tensor is None or tensor.shape != sent.shape:
                found = "no such tensor" if tensor is None else f"shape {tuple(tensor.shape)}"
                raise EngineError(f"weights: {name} of shape {tuple(sent.shape)} was sent, the engine has {found}")
            if not isinstance(tensor, torch.nn.Parameter):  # a buffer, of which the learner knows the dtype
                tensor.data = tensor.data.to(sent.dtype)
            tensor.data.copy_(sent)
        if missing:
            raise EngineError(f"weights: {sorted(missing)} were not sent")
        checksum = WeightsChecksum()
        for name, tensor in held.items():
            checksum.add(name, tensor)
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
        self._batch = make_batch(self._model, frozenset(self._stop_ids), cached=self._cached, max_rows=self._room)

    def _close(self) -> None:
        del self._model
        self.__dict__.pop("_batch", None)  # an engine that sleeps has none
