"""Files of the optimizers' states: one file, or one part per learner if weights are sharded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from trial_ray.errors import CheckpointError, TrialRayError, first_line
from trial_ray.models.sharding import local_part

OPTIMIZER_FILE = "optimizer.pt"
SHARDS_FOLDER = "optimizer"
"""Folder for the parts of a sharded state, next to ``optimizer.pt``, in the format of ``torch.distributed.checkpoint``."""

Optimizers = Mapping[str, torch.optim.Optimizer]
Names = Mapping[Tensor, str]
"""Name of each parameter; names are the same on every learner."""


def new_optimizer(
    parameters: Sequence[torch.nn.Parameter], betas: tuple[float, float], weight_decay: float
) -> torch.optim.Optimizer:
    """Create AdamW with its state allocated."""
    beta1, beta2 = betas
    optimizer = torch.optim.AdamW(parameters, betas=(beta1, beta2), weight_decay=weight_decay, fused=True)
    for parameter in parameters:
        # Allocate the state here: at the first step, it would occupy memory blocks of freed activations, which then stay reserved.
        step = torch.zeros((), dtype=torch.float32, device=local_part(parameter).device)
        moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": step, **moments}
    return optimizer


def save_optimizers(optimizers: Optimizers, iteration: int, folder: Path, *, sharded: bool) -> None:
    """Write the optimizers' states to ``folder``; if they are sharded, :func:`save_shards` writes their tensors."""
    states = {}
    for name, optimizer in optimizers.items():
        state = optimizer.state_dict()
        states[name] = {**state, "state": {}} if sharded else state
    torch.save({"optimizers": states, "iteration": iteration, "sharded": sharded}, folder / OPTIMIZER_FILE)


def state_tensors(optimizers: Optimizers, names: Names) -> dict[str, Tensor]:
    """Return the tensors of the optimizers' states; a name consists of the optimizer, the parameter and the state's key."""
    return {
        f"{name}/{names[parameter]}/{key}": tensor
        for name, optimizer in optimizers.items()
        for parameter, state in optimizer.state.items()
        for key, tensor in state.items()
    }


def save_shards(optimizers: Optimizers, names: Names, folder: Path) -> None:
    """Write this learner's shards of the optimizers' state tensors; every learner must call this.

    Args:
        optimizers: optimizers by name.
        names: names of the parameters.
        folder: folder of the checkpoint.
    """
    # Import here: the config classes import this module, and torch.distributed.checkpoint takes half a second to import.
    from torch.distributed.checkpoint.state_dict_saver import save

    save(state_tensors(optimizers, names), checkpoint_id=folder / SHARDS_FOLDER)


@contextmanager
def reading_checkpoint(path: Path | str) -> Iterator[None]:
    """Convert the errors of RLlib, pickle and transformers about a checkpoint's files to ``CheckpointError``."""
    try:
        yield
    except TrialRayError:
        raise
    except (OSError, EOFError, UnpicklingError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path} is not a whole checkpoint ({type(error).__name__}: {first_line(error)}). Restore another one."
        ) from error


def load_optimizers(optimizers: Optimizers, names: Names | None, folder: Path) -> int:
    """Load the files of :func:`save_optimizers` and :func:`save_shards`, and return the iteration that they contain.

    Args:
        optimizers: optimizers by name, with allocated states.
        names: names of sharded parameters; ``None`` if they are not sharded. The number of learners may have changed.
        folder: folder of the checkpoint.

    Raises:
        CheckpointError: files are missing or damaged, or were written with another ``sharding``.
    """
    file = folder / OPTIMIZER_FILE
    if not file.is_file():
        raise CheckpointError(f"{file} is missing; the checkpoint is incomplete. Resume from another one.")
    try:
        # If the state will be copied to a GPU, memory-map the file: all learners of a node read it at once, and share its pages.
        mapped = torch.cuda.is_available()
        saved: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
        was_sharded, iteration = saved["sharded"], int(saved["iteration"])
        states = {name: saved["optimizers"][name] for name in optimizers}
    except Exception as error:  # torch raises errors of many types for a damaged archive.
        raise _damaged(file, error) from error
    if was_sharded != (names is not None):
        saved_with, ours = ("fsdp", "none") if was_sharded else ("none", "fsdp")
        raise CheckpointError(
            f"{file} was written with sharding={saved_with!r}, but the run has {ours!r}. Set .rl_module(sharding={saved_with!r})."
        )
    tensors: dict[str, Tensor] = {}
    if names is not None:
        tensors = _read_shards(optimizers, names, folder / SHARDS_FOLDER)
        for name, state in states.items():
            state["state"] = optimizers[name].state_dict()["state"]
    before = {name: dict(vars(optimizer)) for name, optimizer in optimizers.items()}
    try:
        for name, state in states.items():
            optimizers[name].load_state_dict(state)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        for name, attributes in before.items():  # Undo the changes that load_state_dict() made before it failed.
            vars(optimizers[name]).update(attributes)
        raise _damaged(file, error) from error
    if names is not None and tensors:
        for key, tensor in state_tensors(optimizers, names).items():
            tensor.copy_(tensors[key])
    return iteration


def _read_shards(optimizers: Optimizers, names: Names, folder: Path) -> dict[str, Tensor]:
    """Return this learner's shard of the optimizer states, named by :func:`state_tensors`; empty if none was saved.

    The tensors are read into new memory: if a part cannot be read, the optimizers stay unchanged.
    """
    if not folder.is_dir():
        return {}
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    tensors = {key: torch.zeros_like(tensor) for key, tensor in state_tensors(optimizers, names).items()}
    try:
        load(tensors, checkpoint_id=folder)
    except CheckpointException as error:  # CheckpointException is not a subclass of Exception.
        raise _damaged(folder, error) from error
    return tensors


def _damaged(file: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"{file} is damaged, or was written for other optimizers ({type(error).__name__}: {first_line(error):.200}). Resume from "
        "another checkpoint."
    )
