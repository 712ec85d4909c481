"""Settings of a model's layers that save memory or time: checkpoints of activations, compilation, matrices at the compute dtype."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trial_ray.errors import ConfigError
from trial_ray.models.sharding import decoder_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def checkpoint_layers(lm: PreTrainedModel) -> None:
    """Make the backward pass recompute the activations of each decoder layer; nothing else changes.

    transformers checkpoints the layers that are in training mode, which also enables dropout and a router's noise. Therefore only
    the flag of the layer is set, and only until the layer's own code runs.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in lm.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"transformers cannot checkpoint the layers of {type(lm).__name__}; set gradient_checkpointing=False, or choose "
            "another model."
        )
    for layer in layers:
        layer.gradient_checkpointing = layer.training = True
        vars(layer)["_gradient_checkpointing_func"] = partial(_checkpointed, layer)


def _checkpointed(layer: nn.Module, call: Callable[..., Any], *args: Any) -> Any:
    def without_training(*args: Any) -> Any:
        layer.training = False
        try:
            return call(*args)
        finally:
            layer.training = True

    return checkpoint(without_training, *args, use_reentrant=False, preserve_rng_state=False)


COMPILE_BACKEND = "inductor"


def compile_layers(lm: PreTrainedModel) -> None:
    """Compile each decoder layer separately, for any number of tokens; all layers of a model share the compiled code."""
    for layer in decoder_layers(lm):
        layer.compile(backend=COMPILE_BACKEND, dynamic=True)


def store_matrices_as(lm: PreTrainedModel, dtype: torch.dtype | None) -> None:
    """Store the matrices of a frozen model's linear layers in the type that autocast would convert them to for each use.

    Log-probabilities stay identical to the bit. Tensors that autocast does not convert (norms, the embedding and a head tied to
    it) are not changed; ``None`` means no autocast.
    """
    if dtype is None:
        return
    embedding = lm.get_input_embeddings().weight
    for module in lm.modules():
        if isinstance(module, nn.Linear) and module.weight is not embedding and not module.weight.requires_grad:
            module.weight.data = module.weight.data.to(dtype)
