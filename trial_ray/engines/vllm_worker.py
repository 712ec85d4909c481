"""Part of the vLLM engine that runs in vLLM's workers: loads weights, and computes checksums of received and loaded weights.

Weights arrive through vLLM's own transfer engines (``vllm.distributed.weight_transfer``). This module registers a transfer engine
for the object store next to vLLM's ``ipc`` and ``nccl``. Updates by every backend therefore have the same three steps
(:class:`WeightLoadingExtension`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from trial_ray.engines.weights import WeightsChecksum, weights_checksum
from trial_ray.files import Json


def keep_cpu_weights_readable() -> None:
    """Make vLLM's CPU linear layers keep their weights, which are read back for checksums.

    By default, the layers pass their weights to oneDNN in a packed form and keep an empty tensor. Products with the plain
    float32 weights cost at most a tenth of the engine's throughput.
    """
    from vllm.model_executor.layers import utils

    def use_torch_linear(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]  # torch's types allow only tensors and modules.

    utils.dispatch_cpu_unquantized_gemm = use_torch_linear


def zero_new_cache_blocks() -> None:
    """Make vLLM zero each block of keys and values before a request uses it, as vLLM itself does for models with Mamba layers.

    vLLM's CPU kernel multiplies old values in the unused rest of a block by 0, and 0 times NaN is NaN. The function is called
    only for the CPU; whether CUDA kernels need zeroed blocks was not tested.
    """
    from vllm.v1.kv_cache_interface import KVCacheConfig

    KVCacheConfig.needs_kv_cache_zeroing = property(lambda self: True)  # type: ignore[method-assign, assignment]


def pack_cpu_experts_again() -> None:
    """Make vLLM convert the weights of mixture-of-experts layers to the layout of its CPU kernels at every load.

    vLLM 0.32 converts them only at the first load. Later loads copy the unpacked weights into memory that the kernel reads as
    packed weights (``UnquantizedFusedMoEMethod._setup_kernel``), so the model would compute wrong log-probabilities.
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    setup = UnquantizedFusedMoEMethod._setup_kernel

    def set_up_and_pack(method: UnquantizedFusedMoEMethod, layer: Any, w13: Tensor, w2: Tensor) -> None:
        kernel = method.moe_kernel
        setup(method, layer, w13, w2)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(layer)

    UnquantizedFusedMoEMethod._setup_kernel = set_up_and_pack  # type: ignore[method-assign, assignment]


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    """Arguments of an update with one shard of the weights.

    Attributes:
        path: path of a safetensors file of checkpoint tensors, to be memory-mapped.
    """

    path: str


class ObjectStoreTransfer(WeightTransferEngine[WeightTransferInitInfo, FileUpdate]):
    """Transfer engine of vLLM that loads safetensors files one after the other; the last file completes the model."""

    init_info_cls = WeightTransferInitInfo
    update_info_cls = FileUpdate

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        """Do nothing, because this backend has no process group to join."""

    def start_weight_update(self) -> None:
        """Prepare every layer to load checkpoint tensors again."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: Json) -> None:
        """Load the tensors of one file into the model.

        vLLM's own method is replaced, because it waits for an accelerator and fails without one.
        """
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: FileUpdate) -> None:
        """Load the checkpoint tensors of one safetensors file into the model."""
        self.model.load_weights(load_file(update_info.path).items())  # type: ignore[operator]  # vLLM's models have this method.

    def finish_weight_update(self) -> None:
        """End the update of every layer, after the last file."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Do nothing, because there are no resources to free."""


WeightTransferEngineFactory.register_engine("object_store", ObjectStoreTransfer)


class WeightLoadingExtension:
    """Mixin of vLLM's worker class (``worker_extension_cls``), called through ``collective_rpc``.

    An update consists of ``begin_update``, one or more calls of vLLM's own ``update_weights``, and ``end_update``.
    """

    model_runner: Any
    vllm_config: Any
    parallel_config: Any
    device: torch.device
    weight_transfer_engine: Any
    _weight_update_active: bool
    _update_begun = False

    def join_transfer(self, backend: str, info: Json) -> None:
        """Join the learner's process group, replacing any previous one."""
        self._choose_transfer(backend)
        self.weight_transfer_engine.shutdown()
        self.init_weight_transfer_engine(info)  # type: ignore[attr-defined]  # vLLM's worker defines it.

    def begin_update(self, backend: str) -> None:
        """Prepare the model for weights sent by ``backend``, and clear the state of an interrupted update."""
        model = self.model_runner.get_model()
        if self._update_begun:
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            # Layers that wait for the rest of an interrupted update would mix it with the next update.
            finalize_layerwise_reload(model, self.vllm_config.model_config)
            self._weight_update_active = False
        self._choose_transfer(backend)
        self._update_begun = True
        self._received = received = WeightsChecksum()
        # Compute the checksum on the worker's device.
        model.load_weights = lambda weights: type(model).load_weights(
            model, received.adding((name, tensor.to(self.device)) for name, tensor in weights)
        )
        self.start_weight_update()  # type: ignore[attr-defined]

    def end_update(self) -> tuple[str, str]:
        """Complete the model; return the checksum of this worker's weights and the arrangement of the received tensors.

        With tensor parallelism, the checksum is also computed from the received tensors, because each worker stores only a part
        of each tensor, and some parts overlap.
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
