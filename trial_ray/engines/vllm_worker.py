"""The part of the vLLM engine that runs where vLLM's model is: takes weights in, sums up what it received and holds.

Weights come through vLLM's own transfer engines (``vllm.distributed.weight_transfer``). Those of the object store have one
here, registered beside vLLM's ``ipc`` and ``nccl``, so that every backend goes through the same three steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from trial_ray.engines.weights import WeightsChecksum, weights_checksum


def keep_cpu_weights_readable() -> None:
    """Make vLLM's CPU linear layers multiply by their own weight.

    By default they hand it to oneDNN in a packed form and keep an empty tensor, so that nothing could read back what
    the engine holds. Plain float32 products cost a tenth of the engine's throughput at most.
    """
    from vllm.model_executor.layers import utils

    def use_torch_linear(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]  # torch knows tensors and modules only

    utils.dispatch_cpu_unquantized_gemm = use_torch_linear


def zero_new_cache_blocks() -> None:
    """Make vLLM zero each block of keys and values that it hands to a request, as it does for models with other caches.

    Its CPU kernel weighs what is left in the rest of a block by 0, and 0 times NaN is NaN. On CUDA, where this
    was not measured, nothing is changed.
    """
    from vllm.v1.kv_cache_interface import KVCacheConfig

    KVCacheConfig.needs_kv_cache_zeroing = property(lambda self: True)  # type: ignore[method-assign, assignment]


def pack_cpu_experts_again() -> None:
    """Make vLLM bring experts into the layout of its CPU kernels at every load.

    vLLM 0.32 does so at the first load alone; later ones copy the weights as they are to where the kernel takes them for packed
    ones (``UnquantizedFusedMoEMethod._setup_kernel``), which is another policy.
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    setup = UnquantizedFusedMoEMethod._setup_kernel

    def set_up_and_pack(method: UnquantizedFusedMoEMethod, layer: Any, w13: torch.Tensor, w2: torch.Tensor) -> None:
        kernel = method.moe_kernel
        setup(method, layer, w13, w2)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(layer)

    UnquantizedFusedMoEMethod._setup_kernel = set_up_and_pack  # type: ignore[method-assign, assignment]


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    """One shard.

    Attributes:
        path: of a safetensors file of checkpoint tensors, to be memory-mapped.
    """

    path: str


class ObjectStoreTransfer(WeightTransferEngine[WeightTransferInitInfo, FileUpdate]):
    """Loads safetensors files, one after the other; the model is complete again after the last."""

    init_info_cls = WeightTransferInitInfo
    update_info_cls = FileUpdate

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        """Nothing: there is no process group to join."""

    def start_weight_update(self) -> None:
        """Prepare every layer to take checkpoint tensors again."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one file; not vLLM's own method, which waits for an accelerator and fails if there is none."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: FileUpdate) -> None:
        """Load one file."""
        self.model.load_weights(load_file(update_info.path).items())  # type: ignore[operator]  # vLLM's models have it

    def finish_weight_update(self) -> None:
        """Complete the layers."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing is held."""


WeightTransferEngineFactory.register_engine("object_store", ObjectStoreTransfer)


class WeightLoadingExtension:
    """Mixed into vLLM's worker class (``worker_extension_cls``); called through ``collective_rpc``.

    An update is ``begin_update``, vLLM's own ``update_weights`` once or more, and ``end_update``.
    """

    model_runner: Any
    vllm_config: Any
    parallel_config: Any
    device: torch.device
    weight_transfer_engine: Any
    _weight_update_active: bool

    def join_transfer(self, backend: str, info: dict[str, Any]) -> None:
        """Join the learner's process group, replacing any previous one."""
        self._choose_transfer(backend)
        self.weight_transfer_engine.shutdown()
        self.init_weight_transfer_engine(info)  # type: ignore[attr-defined]  # of vLLM's worker

    def begin_update(self, backend: str) -> None:
        """Prepare the model for weights that come by ``backend``; what an update that was cut short left is cleared."""
        if getattr(self, "_update_begun", False):
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            # Layers that wait for the rest of a cut transfer would mix it with the next one.
            finalize_layerwise_reload(self.model_runner.get_model(), self.vllm_config.model_config)
            self._weight_update_active = False
        self._choose_transfer(backend)
        self._update_begun = True
        model = self.model_runner.get_model()
        self._received = received = WeightsChecksum()
        load = type(model).load_weights
        model.load_weights = lambda weights: load(model, _counted(weights, received, self.device))
        self.start_weight_update()  # type: ignore[attr-defined]

    def end_update(self) -> tuple[str, str]:
        """Complete the model; return the checksum of the values that this worker holds and the arrangement of those received.

        With tensor parallelism a worker keeps a part of each tensor (and of some more than its part): the checksum is then of
        what it received, too.
        """
        self.finish_weight_update()  # type: ignore[attr-defined]
        self._update_begun = False
        values = self._received.hexdigest
        if self.parallel_config.tensor_parallel_size == 1:
            values = weights_checksum(self.model_runner.get_model().named_parameters())
        return values, self._received.arrangement

    def _choose_transfer(self, backend: str) -> None:
        engines = self.__dict__.setdefault("_transfers", {})
        if backend not in engines:
            from vllm.config.weight_transfer import WeightTransferConfig

            engines[backend] = WeightTransferEngineFactory.create_engine(
                WeightTransferConfig(backend=backend), self.vllm_config, self.device, self.model_runner.get_model()
            )
        self.weight_transfer_engine = engines[backend]


def _counted(
    weights: Iterable[tuple[str, torch.Tensor]], received: WeightsChecksum, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights:
        # Summed where that is fast; from there the model takes its part.
        tensor = tensor.to(device)
        received.add(name, tensor)
        yield name, tensor
