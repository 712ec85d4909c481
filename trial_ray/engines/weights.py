"""Weights on their way from the learner to the engines, never through the driver.

Through the object store, they go as shards of numpy integer views (bfloat16 has no numpy type, its bit pattern has), so that
readers on the same host map them without a copy. Checksums travel along; an engine serves only where those of what it received
or holds are the same.
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

from trial_ray.engines.agreement import TextLogprobs

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
class _Version:
    """One version of the policy's weights.

    Attributes:
        version: number that the learner gave to these weights, 0 or more.
        checksum: :func:`weights_checksum` of the tensors as sent.
        arrangement: ``WeightsChecksum.arrangement`` of the tensors as sent.
        text: what they say of a fixed text, which an engine must say, too; ``None`` compares nothing.

    Raises:
        ValueError: ``version`` is no whole number of at least 0.
    """

    version: int
    checksum: str
    arrangement: str
    text: TextLogprobs | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _require_version(self.version)


@dataclass(frozen=True)
class WeightShards(_Version):
    """Weights in the object store.

    Attributes:
        refs: one reference per :data:`Shard`, owned by the learner's process.
    """

    refs: list[ObjectRef[Shard]]


@dataclass(frozen=True)
class DeviceWeights(_Version):
    """Weights that stay on the learner's device, where engines read or receive them.

    Attributes:
        backend: of vLLM's transfer engine, ``"ipc"`` or ``"nccl"``.
        update: arguments of vLLM's receiving side of that backend (names, shapes, handles).
    """

    backend: str
    update: dict[str, Any]


Weights = WeightShards | DeviceWeights
"""A request to load weights."""


def _require_version(version: object) -> None:
    if not isinstance(version, int) or isinstance(version, bool) or version < 0:
        raise ValueError(f"version: {version!r} found, a whole number of at least 0 expected")


class WeightsChecksum:
    """Sums up tensors one by one, in two ways: their values alone, and their values with names, shapes and places."""

    def __init__(self) -> None:
        self._values = 0
        self._nonzero = 0
        self._arrangement = 0

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
    checksum = WeightsChecksum()
    for name, tensor in named_tensors:
        checksum.add(name, tensor)
    return checksum.hexdigest


def pack_weights(
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    version: int,
    *,
    dtype: torch.dtype | None = None,
    text: TextLogprobs | None = None,
) -> WeightShards:
    """Put weights into the object store; call it inside the learner's process.

    Args:
        named_tensors: checkpoint names and tensors, a tied tensor once (``model.named_parameters()``); may be a
            generator that gathers one tensor at a time, no more than one shard is held.
        version: 0 or more.
        dtype: what floating-point tensors are cast to before they are sent (the engines' dtype); ``None`` sends them
            as they are.
        text: what these weights say of a fixed text.

    Raises:
        ValueError: no tensors, a name twice, or no version.
    """
    _require_version(version)
    checksum = WeightsChecksum()
    refs: list[ObjectRef[Shard]] = []
    names: set[str] = set()
    shard: Shard = {}
    size = 0
    for name, tensor in named_tensors:
        if name in names:
            raise ValueError(f"named_tensors: {name!r} comes twice")
        names.add(name)
        tensor = tensor.detach()
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        checksum.add(name, tensor)
        shard[name] = (_integer_view(tensor), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        size += tensor.nbytes
        if size >= SHARD_BYTES:
            refs.append(ray.put(shard))
            shard, size = {}, 0
    if shard:
        refs.append(ray.put(shard))
    if not refs:
        raise ValueError("named_tensors: at least one tensor expected, none found")
    return WeightShards(version, checksum.hexdigest, checksum.arrangement, refs, text=text)


def iter_shards(shards: WeightShards) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors shard by shard; they share the object store's memory and must only be read.

    Raises:
        ray.exceptions.GetTimeoutError: a shard did not arrive within :data:`FETCH_TIMEOUT_S` seconds.
    """
    for ref in shards.refs:
        shard: Shard = ray.get(ref, timeout=FETCH_TIMEOUT_S)
        yield {name: _to_tensor(*entry) for name, entry in shard.items()}


def iter_weights(shards: WeightShards) -> Iterator[tuple[str, torch.Tensor]]:
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
