"""Tensors of a model, and their conversion to and from the arrays of RLlib's states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trial_ray.errors import CheckpointError
from trial_ray.models.folders import NamedTensors
from trial_ray.models.sharding import copy_whole, gathered


def stored_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's parameters (tied ones once) and persistent buffers, by name.

    Persistent buffers are part of the policy: mixtures of experts, for example, use one to choose among experts.
    """
    unstored = {
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    buffers = {name: buffer for name, buffer in model.named_buffers() if name not in unstored}
    return {**dict(model.named_parameters()), **buffers}


def kept_in_float32(model: nn.Module) -> set[str]:
    """Return the names of the tensors that transformers keeps in float32 in a model of bfloat16 or float16."""
    declared = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return {name for name in stored_tensors(model) if any(f".{part}." in f".{name}." for part in declared)}


def engine_tensors(model: nn.Module, dtype: torch.dtype | None, tensors: NamedTensors | None = None) -> NamedTensors:
    """Yield names and tensors for engines: parameters in ``dtype``, but buffers and tensors of :func:`kept_in_float32` in float32.

    For example, a mixture of experts would choose other experts if its correction buffer were rounded to bfloat16.

    Args:
        model: model of the tensors.
        dtype: dtype of the engines; ``None`` leaves all tensors unchanged.
        tensors: names and tensors of the model without adapters; ``None`` takes the model's :func:`stored_tensors`.
    """
    cast = {
        name.replace(".base_layer.", ".") for name in dict(model.named_parameters()).keys() - kept_in_float32(model)
    }
    for name, tensor in stored_tensors(model).items() if tensors is None else tensors:
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.detach().to(dtype if name in cast else torch.float32)
        yield name, tensor


def to_arrays(tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Copy tensors to arrays on the CPU; bfloat16, which numpy lacks, becomes float32.

    Sharded tensors are gathered one after the other, so every learner must call this.
    """
    arrays = {}
    for name, tensor in tensors.items():
        copy = gathered(tensor).to("cpu", copy=True)
        arrays[name] = (copy.float() if copy.dtype == torch.bfloat16 else copy).numpy()
    return arrays


def require_fitting(arrays: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Reject ``arrays`` (of numpy or torch) with other names or shapes than ``tensors``.

    Raises:
        CheckpointError: names or shapes differ; the message names the first difference.
    """
    missing, unknown = sorted(tensors.keys() - arrays.keys()), sorted(arrays.keys() - tensors.keys())
    if missing or unknown:
        raise CheckpointError(
            f"The state lacks {len(missing)} of {len(tensors)} tensors ({', '.join(missing[:1])}) and has {len(unknown)} unknown "
            f"ones ({', '.join(unknown[:1])}). Expected the result of get_state() of the same model."
        )
    for name, tensor in tensors.items():
        if np.shape(arrays[name]) != tuple(tensor.shape):
            raise CheckpointError(
                f"The state's {name} has shape {list(np.shape(arrays[name]))}, expected {list(tensor.shape)}."
            )


def from_arrays(arrays: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Copy ``arrays`` (of numpy or torch) into ``tensors`` (whole or sharded) by name; either all or none are copied.

    Raises:
        CheckpointError: as in :func:`require_fitting`.
    """
    require_fitting(arrays, tensors)
    for name, tensor in tensors.items():
        array = arrays[name]
        copy_whole(array if isinstance(array, Tensor) else torch.from_numpy(np.array(array)), tensor)
