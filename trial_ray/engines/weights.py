"""Weights as sent from the learner to the engines, without passing through the driver.

In the object store, weights are shards of integer arrays with the tensors' bits (numpy has no bfloat16), which readers on the
same host map without a copy. Checksums are sent along, and an engine serves only if the checksums of its received or loaded
weights match. A checksum confirms the values of the weights, but not how the engine uses them (kernels may require another
layout). The learner's and the engine's log-probabilities of a fixed text are therefore compared, too.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import ray
import torch
from ray import ObjectRef
from torch import Tensor

from trial_ray.errors import WeightSyncError
from trial_ray.models.folders import NamedTensors, parts_of

Shard = dict[str, tuple[np.ndarray, torch.dtype]]
"""Tensors by name. Each is a pair: an array of the tensor's shape with its bits as integers, and the tensor's dtype."""

SHARD_BYTES = 256 * 2**20
"""Size in bytes from which a shard is complete: the next tensor begins a new shard."""
FETCH_TIMEOUT_S = 300.0
"""Deadline in seconds for one shard to reach an engine."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MASKS = {1: 0xFF, 2: 0xFFFF, 4: 0xFFFF_FFFF, 8: -1}
_CHUNK_ELEMENTS = 1 << 20
"""Number of elements summed at a time: few enough for a CPU's caches, and enough for a GPU. ``WeightsChecksum.arrangement``
depends on the number, so every process must use the same."""


@dataclass(frozen=True)
class TextLogprobs:
    """Log-probabilities of a fixed text that the learner computed with the weights that it sends; engines must reproduce them.

    Attributes:
        token_ids: int32 ``[P]``, the text's tokens.
        logprobs: float32 ``[P - 1]``, of every token but the first, given the tokens before it, in nats.
        limit: largest allowed mean difference in nats between the engine's log-probabilities and these.
        model: class of the model, for messages.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    limit: float
    model: str


@dataclass(frozen=True)
class Weights:
    """One version of the policy's weights, for engines to load.

    Attributes:
        version: version number that the learner gave to these weights, 0 or more.
        checksum: :func:`weights_checksum` of the tensors as sent.
        arrangement: ``WeightsChecksum.arrangement`` of the tensors as sent.
        refs: references to the shards in the object store, one per :data:`Shard`, owned by the learner's process.
        backend: ``"object_store"``, or a transfer engine of vLLM: with ``"ipc"``, engines read the weights from the learners' GPUs;
            with ``"nccl"``, the first learner broadcasts the weights to them.
        update: arguments of vLLM's ``update_weights`` for the backends of vLLM (names, dtypes, shapes, handles).
        text: log-probabilities of a fixed text, which an engine must reproduce; ``None`` skips the comparison.
    """

    version: int
    checksum: str
    arrangement: str
    refs: list[ObjectRef[Shard]] = field(default_factory=list)
    backend: str = "object_store"
    update: dict[str, Any] = field(default_factory=dict)
    text: TextLogprobs | None = None


class WeightsChecksum:
    """Incremental checksums: one of the tensors' values only, one of the values with names, shapes and positions.

    Args:
        named_tensors: first tensors to add.
    """

    def __init__(self, named_tensors: NamedTensors = ()) -> None:
        self._values = self._nonzero = self._arrangement = 0
        for _ in self.adding(named_tensors):
            pass

    def adding(self, named_tensors: NamedTensors) -> NamedTensors:
        """Yield names and tensors, and add each tensor before it is yielded."""
        for name, tensor in named_tensors:
            self.add(name, tensor)
            yield name, tensor

    def add(self, name: str, tensor: Tensor) -> None:
        """Add one tensor of any shape, dtype and device."""
        flat = tensor.detach().reshape(-1)
        width = flat.element_size()
        digest = hashlib.blake2b(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=8)
        for chunk in flat.split(_CHUNK_ELEMENTS):
            bits = chunk.view(_BITS[width]).to(torch.int64) & _MASKS[width]
            self._nonzero += int(torch.count_nonzero(bits))
            mixed = _mix(bits)
            self._values += int(mixed.sum())
            weighted = int((mixed * _position_multipliers(mixed.device)[: len(mixed)]).sum())
            digest.update(weighted.to_bytes(8, "little", signed=True))
        self._arrangement += int.from_bytes(digest.digest(), "little")

    @property
    def hexdigest(self) -> str:
        """Checksum of the tensors added so far, as :func:`weights_checksum` returns it."""
        return f"{self._values % 2**64:016x}-{self._nonzero}"

    @property
    def arrangement(self) -> str:
        """Digest of the values and their positions, ``"<16 hex digits>"``: equal for equal names, dtypes, shapes and elements.

        It detects tensors or elements at other positions (layers swapped, a square matrix transposed, tensors of zeros
        omitted). It is compared only between tensors in checkpoint form, because engines fuse and pad tensors. The order of the
        tensors does not matter.
        """
        return f"{self._arrangement % 2**64:016x}"


def weights_checksum(named_tensors: NamedTensors) -> str:
    """Return a checksum of a set of tensors that is unchanged by the layout changes of engines.

    Every element's bit pattern goes through a 64-bit mixing function that maps 0 to 0; the results are added modulo 2**64 and
    joined with the number of elements that have non-zero bits. The checksum is therefore unchanged when tensors are fused, split
    or reordered (``qkv_proj``, ``gate_up_proj``) and when rows of zeros pad the vocabulary.

    It detects any changed value, a tensor that is missing, sent twice or of an old version, and another dtype (chance of a
    miss about 2**-64). Elements at other positions (two tensors swapped, one transposed) are detected by
    ``WeightsChecksum.arrangement``.

    Args:
        named_tensors: as from ``model.named_parameters()``, which lists a tied tensor once; the names do not matter.

    Returns:
        ``"<16 hex digits>-<non-zero elements>"``.
    """
    return WeightsChecksum(named_tensors).hexdigest


def pack_weights(named_tensors: NamedTensors, version: int, text: TextLogprobs | None = None) -> Weights:
    """Put weights into the object store; call this function in the learner's process.

    Args:
        named_tensors: checkpoint names and tensors, a tied tensor once (``model.named_parameters()``). With a generator that
            gathers one tensor at a time, at most one shard is in memory.
        version: version number, 0 or more.
        text: log-probabilities of a fixed text under these weights; ``None`` if engines compare only checksums.
    """
    checksum = WeightsChecksum()
    # A loop's variable would keep a shard's tensors in memory while the next shard is collected; map() keeps none.
    refs = [*map(_put, parts_of(checksum.adding(named_tensors), SHARD_BYTES))]
    return Weights(version, checksum.hexdigest, checksum.arrangement, refs, text=text)


def iter_shards(shards: Weights) -> Iterator[dict[str, Tensor]]:
    """Yield dicts of tensors, one per shard; the tensors share the object store's memory and must not be written to.

    Raises:
        ray.exceptions.GetTimeoutError: a shard did not arrive within :data:`FETCH_TIMEOUT_S` seconds.
    """
    for ref in shards.refs:
        shard: Shard = ray.get(ref, timeout=FETCH_TIMEOUT_S)
        yield {name: _to_tensor(*entry) for name, entry in shard.items()}


def iter_weights(shards: Weights) -> NamedTensors:
    """Yield ``(name, tensor)``; as in :func:`iter_shards`, tensors must only be read (``parameter.copy_(tensor)``)."""
    for shard in iter_shards(shards):
        yield from shard.items()


def _mix(bits: Tensor) -> Tensor:
    """Mix int64 bit patterns (wrapping arithmetic): a bijection that maps 0 to 0 and spreads close values far apart."""
    bits = bits * -0x61C8864680B583EB
    bits ^= (bits >> 31).bitwise_and_(0x1_FFFF_FFFF)
    bits *= -0x40A7B892E31B1A47
    bits ^= (bits >> 29).bitwise_and_(0x7_FFFF_FFFF)
    return bits


@cache
def _position_multipliers(device: torch.device) -> Tensor:
    """Return a multiplier for each position in a chunk, int64; multipliers are odd, so no bit of a value is lost."""
    return _mix(torch.arange(1, _CHUNK_ELEMENTS + 1, device=device)) | 1


def _put(tensors: dict[str, Tensor]) -> ObjectRef[Shard]:
    """Put contiguous tensors on the CPU into the object store."""
    return ray.put(
        {name: (tensor.view(_BITS[tensor.element_size()]).numpy(), tensor.dtype) for name, tensor in tensors.items()}
    )


def _to_tensor(array: np.ndarray, dtype: torch.dtype) -> Tensor:
    with warnings.catch_warnings():
        # Torch warns that the object store's memory is read-only; readers of this module do not write to it.
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array).view(dtype)


TEXT = (
    "You are in the middle of a room. Looking around you, you see a cabinet 2, a cabinet 1, a drawer 1, a fridge 1 and a "
    "countertop 1. Your task is to: put a clean mug on the desk.\n> go to cabinet 1\nThe cabinet 1 is closed."
)
"""Text whose log-probabilities are compared between learner and engine; random tokens would have larger rounding errors."""
MAX_TEXT_TOKENS = 48
TEXT_FACTOR = 3
"""Largest allowed log-probability difference for :data:`TEXT`, as a multiple of ``max_logprob_diff``. The text's tokens are
less probable than sampled tokens, so rounding changes their log-probabilities more: with SmolLM2-135M in bfloat16 by 0.05 nats,
and those of sampled tokens by 0.03 nats."""


def text_ids(tokenizer: Any) -> np.ndarray:
    """Return the token ids of :data:`TEXT`, int32 ``[P]``, at least two."""
    ids = np.asarray(tokenizer.encode(TEXT, add_special_tokens=False)[:MAX_TEXT_TOKENS], np.int32)
    return ids if len(ids) > 1 else np.zeros(2, np.int32)


@torch.no_grad()
def own_logprobs(model: Any, token_ids: np.ndarray, last: int | None = None) -> np.ndarray:
    """Return log-probabilities from a transformers model's own forward pass, without a cache.

    Args:
        model: causal language model in evaluation mode.
        token_ids: int32 ``[P]``.
        last: number of tokens at the end to score; ``None`` scores all except the first.

    Returns:
        Log-probability of each scored token, in nats, float32 ``[last]``.
    """
    last = len(token_ids) - 1 if last is None else last
    ids = torch.from_numpy(token_ids).long().to(model.device)[None]
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=last + 1).logits[0, -last - 1 : -1]
    return torch.log_softmax(logits.float(), -1).gather(-1, ids[0, -last:, None])[:, 0].cpu().numpy()


def require_agreement(expected: TextLogprobs, logprobs: np.ndarray, engine: str) -> None:
    """Require that an engine's log-probabilities of a text, or of the text's first tokens, agree with the sender's.

    Nothing is required if the sender's log-probabilities are not finite: the learner reports such broken weights.

    Raises:
        WeightSyncError: the mean difference exceeds ``expected.limit``.
    """
    expected_logprobs = expected.logprobs[: len(logprobs)]
    gap = float(np.abs(logprobs - expected_logprobs).mean())
    if np.isfinite(expected_logprobs).all() and not gap <= expected.limit:
        advice = "; set engine='transformers'" if engine == "vllm" else ""
        raise WeightSyncError(
            "The engine has the weights that were sent, but computes another policy: log-probabilities of a fixed text differ by "
            f"{gap:.3g} nats per token on average (limit {expected.limit:g}, {TEXT_FACTOR} times max_logprob_diff). The engine "
            f"{engine!r} cannot load new weights of {expected.model}{advice}."
        )
