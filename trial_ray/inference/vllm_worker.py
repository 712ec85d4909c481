"""The part of the vLLM engine that runs where vLLM's model is: takes shards in, tells the checksum of what it holds."""

from __future__ import annotations

from collections.abc import Iterator
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
        layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]  # torch knows tensors and modules only

    utils.dispatch_cpu_unquantized_gemm = use_torch_linear


class WeightLoadingExtension:
    """Mixed into vLLM's worker class (``worker_extension_cls``); called through ``collective_rpc``.

    A new version arrives as safetensors files, one after the other; the model is complete again after the last.
    """

    model_runner: Any
    model_config: Any
    parallel_config: Any
    device: torch.device

    def begin_weights(self) -> None:
        """Prepare every layer to take checkpoint tensors anew."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        # With tensor parallelism a worker keeps a part of each tensor (and of some more than its part): what it received
        # is all that can be compared. Otherwise what it holds at the end says more.
        self._received = WeightsChecksum() if self.parallel_config.tensor_parallel_size > 1 else None
        initialize_layerwise_reload(self.model_runner.get_model())

    def load_weights_file(self, path: str) -> None:
        """Load one safetensors file of checkpoint tensors (memory-mapped)."""
        self.model_runner.get_model().load_weights(self._count(load_file(path)))

    def _count(self, tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors.items():
            if self._received is not None:
                # Summed where that is fast; from there the model takes its part.
                tensor = tensor.to(self.device)
                self._received.add(tensor)
            yield name, tensor

    def finish_weights(self) -> str:
        """Complete the layers; return the checksum of what this worker holds, with tensor parallelism of what it received."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        model = self.model_runner.get_model()
        finalize_layerwise_reload(model, self.model_config)
        if self._received is not None:
            return self._received.hexdigest
        return weights_checksum(model.named_parameters())
