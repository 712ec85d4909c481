"""Weights in files of the Hugging Face format, tensor by tensor: no second copy of a model in memory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from trial_ray.errors import CheckpointError
from trial_ray.models.sharding import copy_whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel

INDEX_FILE = "model.safetensors.index.json"
FILE_BYTES = 512 * 2**20
"""A file of weights is closed once it holds this much, which is the most that is in memory at a time."""


def write_model(lm: PreTrainedModel, weights: Iterable[tuple[str, torch.Tensor]], folder: Path) -> None:
    """Write ``lm``'s configuration and the given weights to ``folder`` (created), from where transformers and vLLM load them.

    Args:
        lm: whose configuration and generation settings.
        weights: names and whole tensors, a tied tensor once; may be a generator that makes one at a time.
        folder: holds no model yet.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lm.config.save_pretrained(folder)
    if lm.generation_config is not None:
        lm.generation_config.save_pretrained(folder)
    written: list[list[str]] = []
    total = 0
    for part in _parts(weights):
        total += sum(tensor.nbytes for tensor in part.values())
        save_file(part, _part_file(folder, len(written)), metadata={"format": "pt"})
        written.append(list(part))
    if len(written) == 1:
        _part_file(folder, 0).rename(folder / "model.safetensors")
        return
    names = [f"model-{index + 1:05d}-of-{len(written):05d}.safetensors" for index in range(len(written))]
    for index, name in enumerate(names):
        _part_file(folder, index).rename(folder / name)
    weight_map = {tensor: name for name, tensors in zip(names, written, strict=True) for tensor in tensors}
    content = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def load_tensors(parameters: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Copy the tensors in ``folder`` into parameters of the same names, whole or sharded; all of them or none.

    Raises:
        CheckpointError: files are missing, or their tensors do not fit.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} holds no *.safetensors file; expected a checkpoint written by this version.")
    shapes = {name: shape for file in files for name, shape in _shapes(file)}
    if missing := sorted(set(parameters) - set(shapes)):
        raise CheckpointError(f"{folder} lacks {len(missing)} of the model's tensors, the first being {missing[0]!r}.")
    for name, parameter in parameters.items():
        if list(parameter.shape) != shapes[name]:
            raise CheckpointError(
                f"{folder}: {name} has shape {shapes[name]}, the model expects {list(parameter.shape)}."
            )
    for file in files:
        with safe_open(file, "pt") as tensors:
            for name in set(tensors.keys()) & set(parameters):
                copy_whole(tensors.get_tensor(name), parameters[name])


def _part_file(folder: Path, index: int) -> Path:
    return folder / f"part-{index:05d}.safetensors"


def _parts(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
    """Tensors by name, on the CPU, as many at a time as a file holds."""
    part: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in weights:
        part[name] = tensor.detach().to("cpu").contiguous()
        size += tensor.nbytes
        if size >= FILE_BYTES:
            yield part
            part, size = {}, 0
    if part:
        yield part


def _shapes(file: Path) -> Iterator[tuple[str, list[int]]]:
    with safe_open(file, "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118  # not a mapping
            yield name, tensors.get_slice(name).get_shape()
