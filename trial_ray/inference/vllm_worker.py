"""The part of the vLLM engine that runs where vLLM's model is: takes shards in, tells the checksum of what it holds."""

from __future__ import annotations

from typing import Any

import torch
from safetensors.torch import load_file

from trial_ray.inference.weights import WeightsChecksum, weights_checksum


def keep_cpu_weights_readable() -> None:
    """Make vLLM's CPU linear layers multiply by their own weight.

    By default they hand it to oneDNN in a packed form and keep an empty tensor, so that nobody could read back what
    the engine holds. Plain float32 products cost a tenth of the engine's throughput at most.
    """
    from vllm.model_executor.layers import utils

    def use_torch_linear(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = use_torch_linear


class WeightLoadingExtension:
    """Mixed into vLLM's worker class (``worker_extension_cls``); called through ``collective_rpc``.

    A new version arrives as safetensors files, one after the other; the model is complete again after the last.
    """

    model_runner: Any
    model_config: Any

    def begin_weights(self) -> None:
        """Prepare every layer to take checkpoint tensors anew."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._received = WeightsChecksum()
        initialize_layerwise_reload(self.model_runner.get_model())

    def load_weights_file(self, path: str) -> None:
        """Load one safetensors file of checkpoint tensors (memory-mapped)."""
        tensors = load_file(path)
        for tensor in tensors.values():
            self._received.add(tensor)
        self.model_runner.get_model().load_weights(iter(tensors.items()))

    def finish_weights(self) -> str:
        """Complete the layers; return the checksum of what this worker then holds.

        With tensor parallelism a worker holds a part (and some parts twice), so the checksum is that of what it
        received.
        """
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        model = self.model_runner.get_model()
        finalize_layerwise_reload(model, self.model_config)
        if self.parallel_config.tensor_parallel_size > 1:
            return self._received.hexdigest
        return weights_checksum(model.named_parameters())
