"""Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685), trained instead of all weights."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import nn

from trial_envs.core.extras import install_command
from trial_ray.errors import CheckpointError, ConfigError, MissingDependencyError
from trial_ray.models.folders import NamedTensors, restore_tensors, write_model
from trial_ray.models.loading import load_causal_lm
from trial_ray.models.sharding import copy_whole, decoder_layers, gathered
from trial_ray.models.tensors import stored_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER_FOLDER = "adapter"
"""Folder of a module checkpoint that contains the adapter in peft's format, in place of the model."""
WEIGHTS_FILE = "adapter_model.safetensors"
_NAME = "default"
_FILE_PREFIX = "base_model.model."


class Adapter:
    """Trainable matrices A ``[rank, in]`` and B ``[out, rank]`` added to linear layers of a model with frozen weights.

    A layer's weight W becomes W + (alpha / rank) B A. B starts at zero, so the model starts unchanged.

    Args:
        lm: the model, changed in place.
        rank: rank of the product B A.
        alpha: scale of the product B A, which is multiplied by alpha / rank.
        targets: last parts of the names of linear layers, such as ``"q_proj"``; all linear layers of the decoder if ``None``.
        dtype: dtype of A and B, which the optimizer updates.
        seed: seed of A's initial values.

    Raises:
        ConfigError: a name in ``targets`` is of no linear layer or of fused experts, or the decoder has no linear layers.
    """

    def __init__(
        self,
        lm: PreTrainedModel,
        *,
        rank: int,
        alpha: float,
        targets: Sequence[str] | None,
        dtype: torch.dtype,
        seed: int,
    ) -> None:
        from peft import LoraConfig, inject_adapter_in_model

        self._lm = lm
        self.config = LoraConfig(
            r=rank,
            lora_alpha=alpha,  # type: ignore[arg-type]  # peft takes any number
            target_modules=_chosen_targets(lm, targets),
            base_model_name_or_path=lm.name_or_path,
            task_type="CAUSAL_LM",
        )
        lm.requires_grad_(False)
        chosen = set(self.config.target_modules or ())
        try:
            inject_adapter_in_model(self.config, lm)
        except ValueError as error:
            raise ConfigError(f"lora_targets: {error}") from error
        if self.config.target_parameters:  # peft has moved the names of fused experts into this list.
            linear = set(self.config.target_modules or ())
            raise ConfigError(
                f"lora_targets: {sorted(chosen - linear)} name fused experts of {type(lm).__name__}, which cannot have adapters. "
                f"Set lora_targets to some of {sorted(linear)}."
            )
        self.scaling = alpha / rank
        self._seed = seed
        for layer in self._layers().values():
            layer.lora_A.to(dtype), layer.lora_B.to(dtype)

    @torch.no_grad()
    def initialise(self) -> None:
        """Set A, whole or sharded, to its initial values, and B to zeros."""
        generator = torch.Generator().manual_seed(self._seed)
        for layer in self._layers().values():
            down, up = layer.lora_A[_NAME].weight, layer.lora_B[_NAME].weight
            whole = torch.empty(down.shape, dtype=down.dtype)
            copy_whole(nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator), down)
            up.zero_()

    def _layers(self) -> dict[str, Any]:
        """Return the adapted layers by their names in the model."""
        return {name: module for name, module in self._lm.named_modules() if hasattr(module, "base_layer")}

    @contextlib.contextmanager
    def switched_off(self) -> Iterator[PreTrainedModel]:
        """Return a context that yields the model without its adapter, which is the model before training."""
        layers = list(self._layers().values())
        for layer in layers:
            layer._disable_adapters = True
        try:
            yield self._lm
        finally:
            for layer in layers:
                layer._disable_adapters = False

    def merged_weights(self) -> NamedTensors:
        """Yield names and weights of the model with the adapter merged into it, one tensor after the other.

        Sharded weights are gathered, so every learner must iterate over all of them.
        """
        layers = self._layers()
        for name, tensor in stored_tensors(self._lm).items():
            if ".lora_" in name:
                continue
            weight = gathered(tensor)
            if name.endswith(".base_layer.weight"):
                layer = layers[name.removesuffix(".base_layer.weight")]
                down, up = gathered(layer.lora_A[_NAME].weight), gathered(layer.lora_B[_NAME].weight)
                weight = weight.to(up.dtype) + self.scaling * (up @ down)
            yield name.replace(".base_layer.", "."), weight

    def tensors(self) -> dict[str, nn.Parameter]:
        """Return the parameters A and B by their names in peft's files."""
        return {
            _FILE_PREFIX + name.replace(f".{_NAME}.", "."): parameter
            for name, parameter in self._lm.named_parameters()
            if ".lora_" in name
        }

    def save(self, folder: Path, write: bool = True) -> None:
        """Write the adapter in peft's format. If weights are sharded, every learner must call this, one with ``write=True``."""
        tensors = {name: gathered(parameter).to("cpu").contiguous() for name, parameter in self.tensors().items()}
        if write:
            folder.mkdir(parents=True, exist_ok=True)
            self.config.save_pretrained(str(folder))
            save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})

    def load(self, folder: Path) -> None:
        """Load an adapter written by :meth:`save`.

        Raises:
            CheckpointError: files are missing, or the adapter has another rank, scale or set of layers.
        """
        from peft import LoraConfig

        if (folder / "adapter_config.json").is_file():
            saved = LoraConfig.from_pretrained(str(folder))
            for setting, saved_with, ours in (
                ("lora_rank", saved.r, self.config.r),
                ("lora_alpha", saved.lora_alpha, self.config.lora_alpha),
                ("lora_targets", sorted(saved.target_modules or ()), sorted(self.config.target_modules or ())),
            ):
                if saved_with != ours:
                    raise CheckpointError(
                        f"{folder} was written with {setting}={saved_with!r}, but the run has {ours!r}, another policy. "
                        f"Set .rl_module({setting}={saved_with!r})."
                    )
        restore_tensors(self.tensors(), folder)


def _chosen_targets(lm: PreTrainedModel, targets: Sequence[str] | None) -> list[str]:
    """Return the last parts of the names of the layers that get adapters.

    Raises:
        ConfigError: a name in ``targets`` is not the last part of the name of a linear layer, or no layer can have an adapter.
    """
    modules = {name: module for layer in decoder_layers(lm) for name, module in layer.named_modules()}
    available = {name.rpartition(".")[2] for name, module in modules.items() if isinstance(module, nn.Linear)}
    chosen = set(available if targets is None else targets)
    if missing := sorted(chosen - available):
        raise ConfigError(
            f"lora_targets names {missing}, but the decoder layers of {type(lm).__name__} have no such linear layers; "
            f"expected some of {sorted(available)}."
        )
    if not chosen:
        raise ConfigError(f"{type(lm).__name__} cannot have adapters: its decoder layers have no linear layers.")
    return sorted(chosen)


def merge_adapter(folder: Path, target: Path) -> None:
    """Merge an adapter in peft's format into its base model and write the result to ``target``, in Hugging Face format.

    Raises:
        CheckpointError: the base model is not at the path that the adapter's config contains.
        MissingDependencyError: peft is not installed.
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise MissingDependencyError(
            f"{folder} is an adapter of peft; install it with: {install_command('lora')}"
        ) from error

    config = LoraConfig.from_pretrained(str(folder))
    base = str(config.base_model_name_or_path)
    if not Path(base).is_dir():
        raise CheckpointError(f"{folder} is an adapter of the model in {base}, which is missing. Restore it there.")
    lm = load_causal_lm(base, "float32")
    adapter = Adapter(
        lm, rank=config.r, alpha=config.lora_alpha, targets=sorted(config.target_modules), dtype=torch.float32, seed=0
    )
    adapter.load(folder)
    write_model(lm, adapter.merged_weights(), target)
