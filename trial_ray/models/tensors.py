"""The tensors that a model consists of, and their form in RLlib's states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from trial_ray.errors import CheckpointError
from trial_ray.models.sharding import copy_whole, gathered


def stored_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, tied ones once, and the buffers that are stored with them, by name.

    Such a buffer is part of the policy, too: mixtures of experts choose among experts by one.
    """
    unstored = {
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    buffers = {name: buffer for name, buffer in model.named_buffers() if name not in unstored}
    return {**dict(model.named_parameters()), **buffers}


def to_arrays(tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Copies of tensors on the CPU; bfloat16, which numpy lacks, as float32.

    Sharded ones are gathered one after the other, so every learner must call this.
    """
    arrays = {}
    for name, tensor in tensors.items():
        copy = gathered(tensor).to("cpu", copy=True)
        arrays[name] = (copy.float() if copy.dtype == torch.bfloat16 else copy).numpy()
    return arrays


def require_fitting(arrays: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse arrays, or tensors, of other names or shapes than the tensors have.

    Raises:
        CheckpointError: names the first.
    """
    missing, unknown = sorted(tensors.keys() - arrays.keys()), sorted(arrays.keys() - tensors.keys())
    if missing or unknown:
        raise CheckpointError(
            f"The state lacks {len(missing)} of {len(tensors)} tensors ({', '.join(missing[:1])}) and has {len(unknown)} unknown "
            f"ones ({', '.join(unknown[:1])}). Expected what get_state() of the same model gives."
        )
    for name, tensor in tensors.items():
        if np.shape(arrays[name]) != tuple(tensor.shape):
            raise CheckpointError(
                f"The state's {name} has shape {list(np.shape(arrays[name]))}, expected {list(tensor.shape)}."
            )


def from_arrays(arrays: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy arrays, or tensors, into the tensors of the same names, whole or sharded; all of them or none.

    Raises:
        CheckpointError: as :func:`require_fitting`.
    """
    require_fitting(arrays, tensors)
    for name, tensor in tensors.items():
        array = arrays[name]
        copy_whole(array if isinstance(array, torch.Tensor) else torch.from_numpy(np.array(array)), tensor)
