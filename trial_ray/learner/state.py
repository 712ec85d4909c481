"""Files of the optimizers' states: one file, or one part per learner if weights are sharded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from trial_ray.errors import CheckpointError, TrialRayError, first_line
from trial_ray.models.sharding import local_part

OPTIMIZER_FILE = "optimizer.pt"
SHARDS_FOLDER = "optimizer"
"""Folder next to the file with the parts of a sharded state, in the format of ``torch.distributed.checkpoint``."""

Optimizers = Mapping[str, torch.optim.Optimizer]
Names = Mapping[torch.Tensor, str]
"""Names of the parameters, the same on every learner."""


def new_optimizer(
    parameters: Sequence[torch.nn.Parameter], betas: tuple[float, float], weight_decay: float
) -> torch.optim.Optimizer:
    """Create AdamW with its state."""
    beta1, beta2 = betas
    optimizer = torch.optim.AdamW(parameters, betas=(beta1, beta2), weight_decay=weight_decay, fused=True)
    for parameter in parameters:
        # Now, and not at the first step, out of blocks that activations have left: those could never be given back.
        step = torch.zeros((), dtype=torch.float32, device=local_part(parameter).device)
        moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": step, **moments}
    return optimizer


def save_optimizers(optimizers: Optimizers, iteration: int, folder: Path, *, sharded: bool) -> None:
    """Write the states to ``folder``; sharded states without their tensors, see :func:`save_shards`."""
    states = {}
    for name, optimizer in optimizers.items():
        state = optimizer.state_dict()
        states[name] = {**state, "state": {}} if sharded else state
    torch.save({"optimizers": states, "iteration": iteration, "sharded": sharded}, folder / OPTIMIZER_FILE)


def state_tensors(optimizers: Optimizers, names: Names) -> dict[str, torch.Tensor]:
    """Return the states' tensors by names of optimizer, parameter and kind."""
    return {
        f"{each}/{names[parameter]}/{key}": tensor
        for each, optimizer in optimizers.items()
        for parameter, state in optimizer.state.items()
        for key, tensor in state.items()
    }


def save_shards(optimizers: Optimizers, names: Names, folder: Path) -> None:
    """Write this learner's part of the states' tensors; every learner must call this.

    Args:
        optimizers: optimizers by name, as created.
        names: names of the parameters.
        folder: folder of the checkpoint.
    """
    # Not at the top: a config imports this, and the package takes half a second.
    from torch.distributed.checkpoint.state_dict_saver import save

    save(state_tensors(optimizers, names), checkpoint_id=folder / SHARDS_FOLDER)


@contextmanager
def reading_checkpoint(path: Path | str) -> Iterator[None]:
    """Raise what RLlib, pickle and transformers raise about a checkpoint's files as a ``CheckpointError``."""
    try:
        yield
    except TrialRayError:
        raise
    except (OSError, EOFError, UnpicklingError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path} is not a whole checkpoint ({type(error).__name__}: {first_line(error)}). Restore another one."
        ) from error


def load_optimizers(optimizers: Optimizers, names: Names | None, folder: Path) -> int:
    """Load the files of :func:`save_optimizers` and :func:`save_shards`; returns the iteration.

    Args:
        optimizers: optimizers by name, as created.
        names: names of the parameters, if they are sharded; the checkpoint may be from another number of learners.
        folder: folder of the checkpoint.

    Raises:
        CheckpointError: files are missing or damaged, or the states have another sharding.
    """
    file = folder / OPTIMIZER_FILE
    if not file.is_file():
        raise CheckpointError(f"{file} is missing; the checkpoint is incomplete. Resume from another one.")
    try:
        # Mapped if it is copied to a device anyway: all learners of a node read it at once.
        mapped = torch.cuda.is_available()
        saved: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
        was_sharded, iteration = saved["sharded"], int(saved["iteration"])
        states = {name: saved["optimizers"][name] for name in optimizers}
    except Exception as error:  # whatever a damaged archive makes of torch's reader
        raise _damaged(file, error) from error
    if was_sharded != (names is not None):
        found, expected = ("fsdp", "none") if was_sharded else ("none", "fsdp")
        raise CheckpointError(
            f"{file} was written with sharding={found!r}, but the run has {expected!r}. Set .rl_module(sharding={found!r})."
        )
    tensors: dict[str, torch.Tensor] = {}
    if names is not None:
        tensors = _read_shards(optimizers, names, folder / SHARDS_FOLDER)
        for name, state in states.items():
            state["state"] = optimizers[name].state_dict()["state"]
    before = {name: dict(vars(optimizer)) for name, optimizer in optimizers.items()}
    try:
        for name, state in states.items():
            optimizers[name].load_state_dict(state)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        for name, attributes in before.items():  # torch sets a state before it looks at all of it
            vars(optimizers[name]).update(attributes)
        raise _damaged(file, error) from error
    if names is not None and tensors:
        for key, tensor in state_tensors(optimizers, names).items():
            tensor.copy_(tensors[key])
    return iteration


def _read_shards(optimizers: Optimizers, names: Names, folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of this learner's part, by :func:`state_tensors`' names; empty if the state has no tensors.

    They are not read in place: a part that cannot be read leaves the optimizers unchanged.
    """
    if not folder.is_dir():
        return {}
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    found = {key: torch.zeros_like(tensor) for key, tensor in state_tensors(optimizers, names).items()}
    try:
        load(found, checkpoint_id=folder)
    except CheckpointException as error:  # which is no Exception
        raise _damaged(folder, error) from error
    return found


def _damaged(file: Path, error: BaseException) -> CheckpointError:
    reason = (str(error).splitlines() or [""])[0]
    return CheckpointError(
        f"{file} is damaged, or was written for other optimizers ({type(error).__name__}: {reason:.200}). Resume from another "
        "checkpoint."
    )
