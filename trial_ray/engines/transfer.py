"""Weight transfer from learners to engines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import ray
import torch
from ray.actor import ActorHandle
from torch import Tensor

from trial_ray.engines.link import Engines
from trial_ray.engines.weights import Weights, WeightsChecksum, pack_weights
from trial_ray.errors import ConfigError, EngineError, WeightSyncError
from trial_ray.files import Json
from trial_ray.models.folders import NamedTensors

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer import ParamMeta, TrainerWeightTransferEngine

BACKENDS = ("object_store", "ipc", "nccl")

NamedWeights = Callable[[], NamedTensors]
"""Function that yields the names and tensors to send to the engines, each tied tensor once; it can be called repeatedly.

If the model is sharded, each tensor is gathered when it is yielded, so every learner has to iterate over all of them.
"""


@dataclass(eq=False, repr=False)
class WeightSender(ABC):
    """Sends weights from the learners to the engines by one backend.

    Every learner has a sender, and all senders get the same calls.

    Attributes:
        rank: rank of the learner; if one sender is enough, the learner of rank 0 sends.
    """

    rank: int

    @abstractmethod
    def prepare(self, weights: NamedWeights, version: int, engines: Engines) -> Weights | None:
        """Prepare one version of the weights.

        Args:
            weights: weights of the policy.
            version: version number, 0 or more.
            engines: engines that will load the weights.

        Returns:
            Weights to pass to the engines; ``None`` if the engines need nothing from this learner.
        """

    def send(self) -> None:  # noqa: B027  # Most backends have nothing to do here.
        """Send the weights while the engines load; do nothing if the engines read the prepared weights themselves."""

    def release(self) -> None:  # noqa: B027
        """Free the prepared weights, after every engine has loaded them or failed."""


def merge_weights(prepared: Sequence[Weights | None]) -> Weights:
    """Merge the results of :meth:`WeightSender.prepare` on all learners into one :class:`Weights`.

    Raises:
        WeightSyncError: learners have different weights.
    """
    first, *others = parts = [weights for weights in prepared if weights is not None]
    if differing := {(part.checksum, part.arrangement) for part in others} - {(first.checksum, first.arrangement)}:
        raise WeightSyncError(
            f"Learners have different weights: checksum {first.checksum} on the first (arrangement {first.arrangement}), "
            f"{sorted(differing)} on others. Resume from the last checkpoint."
        )
    if first.backend != "ipc":
        return first
    # Every learner has a copy of each tensor on its own GPU; an engine uses the handle of the GPU that it runs on.
    tensors = zip(*(part.update["ipc_handles"] for part in parts), strict=True)
    return replace(first, update={**first.update, "ipc_handles": [dict(ChainMap(*handles)) for handles in tensors]})


def contiguous_weights(weights: NamedWeights) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors, detached and contiguous in memory."""
    for name, tensor in weights():
        yield name, tensor.detach().contiguous()


JOIN_TIMEOUT_S = 300.0
"""Deadline in seconds for all engines and the learner to join one NCCL group."""


class ObjectStoreSender(WeightSender):
    """Sends weights through Ray's object store; they stay readable as long as a reference to them exists."""

    def prepare(self, weights: NamedWeights, version: int, engines: Engines) -> Weights | None:
        """Put the weights into the object store on the first learner; other learners only take part in gathering them."""
        if self.rank:
            for _ in weights():
                pass
            return None
        return pack_weights(weights(), version)


@dataclass(eq=False, repr=False)
class IPCSender(WeightSender):
    """Sends weights by CUDA IPC: an engine reads copies, in the engine's dtype, from the GPU that it shares with a learner.

    Every learner provides the copies on its own GPU, and keeps them (2 bytes per parameter in bfloat16) until :meth:`release`.
    Neither gradients nor the engines' key-value caches are allocated before then. A whole tensor that the
    learner stores in the engine's dtype is not copied.
    """

    _copies: list[Tensor] = field(default_factory=list, init=False)

    def prepare(self, weights: NamedWeights, version: int, engines: Engines) -> Weights | None:
        """Copy the weights; the result contains the IPC handle of every copy, under the UUID of this learner's GPU."""
        from torch.multiprocessing.reductions import reduce_tensor

        named_tensors = list(contiguous_weights(weights))
        checksum = WeightsChecksum(named_tensors)
        self._copies = [tensor for _, tensor in named_tensors]
        gpu = str(torch.cuda.get_device_properties(self._copies[0].device).uuid)
        handles = [{gpu: reduce_tensor(tensor)[1]} for tensor in self._copies]
        torch.cuda.synchronize(self._copies[0].device)
        update = _update(named_tensors) | {"ipc_handles": handles}
        return Weights(version, checksum.hexdigest, checksum.arrangement, backend="ipc", update=update)

    def release(self) -> None:
        """Free the copies of the weights that engines have opened by CUDA IPC."""
        self._copies = []
        torch.cuda.ipc_collect()


@dataclass(eq=False, repr=False)
class NCCLSender(WeightSender):
    """Sends weights by an NCCL broadcast from the first learner to every worker of every engine, on separate GPUs.

    The NCCL group is created again whenever the engines have changed. A broadcast cannot be cancelled if a receiver dies: the
    learner then hangs in the broadcast until the deadline of the driver's call ends the run.

    Attributes:
        workers_per_engine: number of GPUs that one engine computes on.
    """

    workers_per_engine: int
    _members: list[ActorHandle[Any]] = field(default_factory=list, init=False)
    _group: TrainerWeightTransferEngine[Any] | None = field(default=None, init=False)
    _source: _Source | None = field(default=None, init=False)

    def prepare(self, weights: NamedWeights, version: int, engines: Engines) -> Weights | None:
        """Compute the checksum of the weights; the first learner creates a new NCCL group if the engines changed."""
        from vllm.distributed.weight_transfer import ParamMeta

        self._source = _Source(weights)
        checksum = WeightsChecksum()
        metadata = [
            ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in checksum.adding(self._source)
        ]
        if self.rank:
            return None
        self._source.declared = metadata
        if list(engines) != self._members:
            self._join_group(engines)
        update = _update([(meta.name, meta) for meta in metadata])
        return Weights(version, checksum.hexdigest, checksum.arrangement, backend="nccl", update=update)

    def send(self) -> None:
        """Broadcast the weights; every learner takes part in gathering the tensors that the first learner sends."""
        assert self._source is not None, "no weights were prepared"
        if self._group is None:
            for _ in self._source:
                pass
            return
        self._group.source = self._source  # type: ignore[assignment]  # _Source is not vLLM's subclass: vLLM is imported late.
        self._group.send_weights()

    def release(self) -> None:
        """Drop the prepared weights; the NCCL group stays."""
        self._source = None

    def _join_group(self, engines: Engines) -> None:
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
        from vllm.utils.network_utils import get_open_port

        if self._group is not None:
            # Drop the old group first: if joining the new one fails, nothing must be sent to a group that has ended.
            self._group.shutdown()
            self._group, self._members = None, []
        info = NCCLTrainerInitInfo(
            rank=0,
            master_address=ray.util.get_node_ip_address(),
            master_port=get_open_port(),
            world_size=1 + len(engines) * self.workers_per_engine,
        )
        client = _EngineCalls(engines, self.workers_per_engine)
        source: Any = self._source
        self._group = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
        self._members = list(engines)


def weight_sender(backend: str, rank: int, workers_per_engine: int) -> WeightSender:
    """Return the sender of a backend.

    Args:
        backend: a name in :data:`BACKENDS`.
        rank: rank of the learner.
        workers_per_engine: number of GPUs that one engine computes on.

    Raises:
        ConfigError: the backend needs CUDA, and this process has no CUDA device.
    """
    if backend == "object_store":
        return ObjectStoreSender(rank)
    if not torch.cuda.is_available():
        raise ConfigError(
            f"weight_transfer={backend!r} needs the learner on a CUDA device, and this process has none; set "
            "num_gpus_per_learner, or weight_transfer='object_store'."
        )
    return IPCSender(rank) if backend == "ipc" else NCCLSender(rank, workers_per_engine)


@dataclass(eq=False, repr=False)
class _Source:
    """Weights in the form that vLLM's trainer expects (its ``WeightSource``)."""

    weights: NamedWeights
    declared: list[ParamMeta] = field(default_factory=list)

    def metadata(self) -> list[ParamMeta]:
        return self.declared

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return contiguous_weights(self.weights)


@dataclass(eq=False, repr=False)
class _EngineCalls:
    """Client through which vLLM's trainer calls the engines (its ``VLLMWeightSyncClient``).

    Only the call to join the NCCL group has an effect. Engines start and end an update inside their own ``load_weights``, which
    the pool calls and which blocks generation requests.
    """

    engines: Engines
    workers_per_engine: int

    def init_weight_transfer_engine(self, init_info: Json) -> None:
        joining = [
            engine.join_transfer.remote("nccl", init_info | {"rank_offset": 1 + index * self.workers_per_engine})
            for index, engine in enumerate(self.engines)
        ]
        try:
            ray.get(joining, timeout=JOIN_TIMEOUT_S)
        except ray.exceptions.GetTimeoutError as error:
            raise EngineError(
                f"The engines did not join the learner's NCCL group within {JOIN_TIMEOUT_S:.0f} s; check that their nodes "
                "reach each other, or set weight_transfer='object_store'."
            ) from error

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: Any) -> None:
        pass

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        pass


def _update(named_tensors: Iterable[tuple[str, Tensor | ParamMeta]]) -> dict[str, Any]:
    """Return the arguments that vLLM's ``update_weights`` has for every backend: names, dtypes and shapes of the tensors."""
    names, tensors = zip(*named_tensors, strict=True)
    dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
    return {"names": list(names), "dtype_names": dtypes, "shapes": [list(tensor.shape) for tensor in tensors]}
