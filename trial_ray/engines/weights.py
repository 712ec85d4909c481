"""Weights on their way from the learner to the engines, never through the driver.

Through the object store, they go as shards of numpy integer views (bfloat16 has no numpy type, its bit pattern has), so that
readers on the same host map them without a copy. Checksums travel along; an engine serves only where those of what it received
or holds are the same. A checksum confirms the numbers that an engine holds, not what it does with them (kernels may want them in
another layout): log-probabilities of a fixed text, the learner's beside the engine's, tell whether it computes that policy.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import ray
import torch
from ray import ObjectRef

from trial_ray.errors import WeightSyncError

#: Name of a tensor -> (integer view ``[elements]``, torch dtype name such as ``"bfloat16"``, shape).
Shard = dict[str, tuple[np.ndarray, str, tuple[int, ...]]]

SHARD_BYTES = 256 * 2**20
"""A shard is closed once it holds this much."""
FETCH_TIMEOUT_S = 300.0
"""Deadline of one shard on its way to an engine."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MASKS = {1: 0xFF, 2: 0xFFFF, 4: 0xFFFF_FFFF, 8: -1}
_CHUNK_ELEMENTS = 1 << 20
"""Summed at a time: few enough for a CPU's caches, enough for a GPU; the same in every process, as arrangements depend on it."""


@dataclass(frozen=True)
class TextLogprobs:
    """Log-probabilities of a text under the weights that are sent, as their sender computes them.

    Attributes:
        token_ids: int32 ``[P]``.
        logprobs: float32 ``[P - 1]``, of every token but the first after those before it, in nats.
        limit: mean difference from which on an engine's are those of another policy, in nats.
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
        version: number that the learner gave to these weights, 0 or more.
        checksum: :func:`weights_checksum` of the tensors as sent.
        arrangement: ``WeightsChecksum.arrangement`` of the tensors as sent.
        refs: in the object store: one reference per :data:`Shard`, owned by the learner's process.
        backend: ``"object_store"``, or vLLM's transfer engine ``"ipc"`` or ``"nccl"``, for weights that stay on the learner's
            device, where engines read or receive them.
        update: arguments of that backend's ``update_weights`` in vLLM (names, dtypes, shapes, handles).
        text: what they say of a fixed text, which an engine must say, too; ``None`` compares nothing.
    """

    version: int
    checksum: str
    arrangement: str
    refs: list[ObjectRef[Shard]] = field(default_factory=list)
    backend: str = "object_store"
    update: dict[str, Any] = field(default_factory=dict)
    text: TextLogprobs | None = None


class WeightsChecksum:
    """Sums up tensors one by one, in two ways: their values alone, and their values with names, shapes and places.

    Args:
        named_tensors: the first of them.
    """

    def __init__(self, named_tensors: Iterable[tuple[str, torch.Tensor]] = ()) -> None:
        self._values = self._nonzero = self._arrangement = 0
        for name, tensor in named_tensors:
            self.add(name, tensor)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take in one tensor of any shape, dtype and device."""
        flat = tensor.detach().reshape(-1)
        width = flat.element_size()
        digest = hashlib.blake2b(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=8)
        for chunk in flat.split(_CHUNK_ELEMENTS):
            bits = chunk.view(_BITS[width]).to(torch.int64) & _MASKS[width]
            self._nonzero += int(torch.count_nonzero(bits))
            mixed = _mix(bits)
            self._values += int(mixed.sum())
            placed = int((mixed * _places(mixed.device)[: len(mixed)]).sum())
            digest.update(placed.to_bytes(8, "little", signed=True))
        self._arrangement += int.from_bytes(digest.digest(), "little")

    @property
    def hexdigest(self) -> str:
        """:func:`weights_checksum` so far."""
        return f"{self._values % 2**64:016x}-{self._nonzero}"

    @property
    def arrangement(self) -> str:
        """Digest of which values stand where, ``"<16 hex digits>"``: equal for equal names, dtypes, shapes and elements.

        It sees tensors or elements that changed places (layers swapped, a square transposed, tensors of zeros left out),
        and is compared only between tensors in checkpoint form: engines fuse and pad. The order of the tensors does not count.
        """
        return f"{self._arrangement % 2**64:016x}"


def weights_checksum(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Checksum of a set of tensors that survives what engines do to their layout.

    Every element's bit pattern goes through a 64-bit mixing function that keeps 0 at 0; the results are added modulo
    2**64 and joined with the number of elements whose bits are not zero. It is therefore unchanged when tensors are
    fused, split or reordered (``qkv_proj``, ``gate_up_proj``) and when rows of zeros pad the vocabulary.

    It detects a value changed anywhere, a tensor missing, sent twice or left from another version, and another dtype
    (chance of a miss about 2**-64). Elements that changed places (two tensors swapped, one transposed) show in
    ``WeightsChecksum.arrangement``.

    Args:
        named_tensors: as from ``model.named_parameters()``, which names a tied tensor once; names themselves do not
            count.

    Returns:
        ``"<16 hex digits>-<non-zero elements>"``.
    """
    return WeightsChecksum(named_tensors).hexdigest


def pack_weights(
    named_tensors: Iterable[tuple[str, torch.Tensor]], version: int, text: TextLogprobs | None = None
) -> Weights:
    """Put weights into the object store; call it inside the learner's process.

    Args:
        named_tensors: checkpoint names and tensors, a tied tensor once (``model.named_parameters()``); may be a
            generator that gathers one tensor at a time, no more than one shard is held.
        version: 0 or more.
        text: what these weights say of a fixed text.
    """
    checksum = WeightsChecksum()
    refs: list[ObjectRef[Shard]] = []
    shard: Shard = {}
    size = 0
    for name, tensor in named_tensors:
        tensor = tensor.detach()
        checksum.add(name, tensor)
        shard[name] = (_integer_view(tensor), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        size += tensor.nbytes
        if size >= SHARD_BYTES:
            refs.append(ray.put(shard))
            shard, size = {}, 0
    if shard:
        refs.append(ray.put(shard))
    return Weights(version, checksum.hexdigest, checksum.arrangement, refs, text=text)


def iter_shards(shards: Weights) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors shard by shard; they share the object store's memory and must only be read.

    Raises:
        ray.exceptions.GetTimeoutError: a shard did not arrive within :data:`FETCH_TIMEOUT_S` seconds.
    """
    for ref in shards.refs:
        shard: Shard = ray.get(ref, timeout=FETCH_TIMEOUT_S)
        yield {name: _to_tensor(*entry) for name, entry in shard.items()}


def iter_weights(shards: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``(name, tensor)``; like :func:`iter_shards`, only to be read (``parameter.copy_(tensor)``)."""
    for shard in iter_shards(shards):
        yield from shard.items()


def _mix(bits: torch.Tensor) -> torch.Tensor:
    """Mix int64 bit patterns (wrapping arithmetic): a bijection that maps 0 to 0 and spreads close values far apart."""
    bits = bits * -0x61C8864680B583EB
    bits ^= (bits >> 31).bitwise_and_(0x1_FFFF_FFFF)
    bits *= -0x40A7B892E31B1A47
    bits ^= (bits >> 29).bitwise_and_(0x7_FFFF_FFFF)
    return bits


@cache
def _places(device: torch.device) -> torch.Tensor:
    """A multiplier for each place in a chunk, odd so that no bit of a value is lost."""
    return _mix(torch.arange(1, _CHUNK_ELEMENTS + 1, device=device)) | 1


def _integer_view(tensor: torch.Tensor) -> np.ndarray:
    flat = tensor.contiguous().reshape(-1)
    return flat.view(_BITS[flat.element_size()]).cpu().numpy()


def _to_tensor(array: np.ndarray, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    with warnings.catch_warnings():
        # Torch warns that the store's memory cannot be written; readers of this module promise not to.
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array).view(getattr(torch, dtype)).reshape(shape)


TEXT = (
    "You are in the middle of a room. Looking around you, you see a cabinet 2, a cabinet 1, a drawer 1, a fridge 1 and a "
    "countertop 1. Your task is to: put a clean mug on the desk.\n> go to cabinet 1\nThe cabinet 1 is closed."
)
"""Ordinary text, of ordinary log-probabilities: those of random tokens would differ more by rounding alone."""
MOST_TOKENS = 48
TEXT_FACTOR = 3
"""Multiple of the limit on sampled tokens: others are less probable, and differ more by rounding (SmolLM2-135M in bfloat16 by 0.05
nats instead of 0.03)."""


def text_ids(tokenizer: Any) -> np.ndarray:
    """The tokens of the text, int32 ``[P]``, two at least."""
    ids = np.asarray(tokenizer.encode(TEXT, add_special_tokens=False)[:MOST_TOKENS], np.int32)
    return ids if len(ids) > 1 else np.zeros(2, np.int32)


@torch.no_grad()
def own_logprobs(model: Any, token_ids: np.ndarray, last: int | None = None) -> np.ndarray:
    """Log-probabilities by a transformers model's own forward pass, without cache.

    Args:
        model: in evaluation mode.
        token_ids: int32 ``[P]``.
        last: of so many tokens at the end; ``None``: of all but the first.

    Returns:
        float32 ``[last]``, in nats.
    """
    last = len(token_ids) - 1 if last is None else last
    ids = torch.from_numpy(token_ids).long().to(model.device)[None]
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=last + 1).logits[0, -last - 1 : -1]
    logprobs = torch.log_softmax(logits.float(), -1).gather(-1, ids[0, -last:, None])
    found: np.ndarray = logprobs[:, 0].cpu().numpy()
    return found


def require_agreement(expected: TextLogprobs, logprobs: np.ndarray, engine: str) -> None:
    """Compare an engine's log-probabilities, of the first tokens at least, with the sender's.

    Where those of the sender are no numbers, its weights are broken: others say so.

    Raises:
        WeightSyncError: the engine computes another policy.
    """
    theirs = expected.logprobs[: len(logprobs)]
    gap = float(np.abs(logprobs - theirs).mean())
    if np.isfinite(theirs).all() and not gap <= expected.limit:
        advice = "; set engine='transformers'" if engine == "vllm" else ""
        raise WeightSyncError(
            "The engine has the weights that were sent, but computes another policy: log-probabilities of a fixed text differ by "
            f"{gap:.3g} nats per token on average (limit {expected.limit:g}, {TEXT_FACTOR} times max_logprob_diff). The engine "
            f"{engine!r} cannot load new weights of {expected.model}{advice}."
        )
