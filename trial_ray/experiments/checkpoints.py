"""Where checkpoints and the models inside them lie."""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path
from typing import Any

from trial_ray.errors import CheckpointError, UserInputError

MODEL_INSIDE_CHECKPOINT = Path("learner_group/learner/rl_module/default_policy/hf")
CHECKPOINT_EVERY = 10
"""Iterations between checkpoints, unless a user says otherwise."""
CHECKPOINTS_KEPT = 2
"""How many of the newest are kept, unless a user says otherwise."""
CHECKPOINT_MARK = "rllib_checkpoint.json"


def save_checkpoint(algorithm: Any, folder: Path, iteration: int) -> Path:
    """Save ``algorithm`` as ``folder/<iteration>``; the folder appears only once it is complete."""
    target = folder.resolve() / f"{iteration:06d}"
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    partial.mkdir(parents=True)
    try:
        algorithm.save_to_path(str(partial))
        if target.exists():
            shutil.rmtree(target)
        os.replace(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints in a ``checkpoints`` folder, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.name.isdecimal() and (path / CHECKPOINT_MARK).is_file())


def prune_checkpoints(folder: Path, keep: int) -> None:
    """Delete all but the newest ``keep`` checkpoints."""
    for path in list_checkpoints(folder)[:-keep]:
        shutil.rmtree(path)


def find_checkpoint(path: Path | str) -> Path:
    """The checkpoint that ``path`` means: itself, or the newest one of a run folder.

    Raises:
        CheckpointError: there is none.
    """
    path = Path(path).expanduser().resolve()
    if not path.exists():
        raise CheckpointError(f"{path} does not exist. Name a checkpoint, or a run folder that holds one.")
    if (path / CHECKPOINT_MARK).is_file():
        return path
    found = list_checkpoints(path / "checkpoints") or list_checkpoints(path)
    if not found:
        raise CheckpointError(
            f"{path} holds no complete checkpoint. Name a checkpoint, or a run folder that holds one."
        )
    return found[-1]


def find_model(path: Path | str) -> Path:
    """The Hugging Face model folder that ``path`` means: itself, or the one inside a checkpoint or run folder.

    Raises:
        CheckpointError: there is none, or it is incomplete.
    """
    path = Path(path).expanduser().resolve()
    if not _is_model(path):
        path = find_checkpoint(path) / MODEL_INSIDE_CHECKPOINT
    if not _is_model(path):
        raise CheckpointError(f"{path} lacks config.json or *.safetensors: the checkpoint is incomplete.")
    return path


def find_run_folder(path: Path | str) -> Path | None:
    """The run folder that ``path`` is or lies in, told by its ``run.json``; ``None`` where there is none."""
    path = Path(path).expanduser().resolve()
    return next((folder for folder in (path, *path.parents) if (folder / "run.json").is_file()), None)


def export_model(source: Path | str, target: Path | str) -> Path:
    """Copy the model out of a checkpoint into the new folder ``target``.

    Raises:
        CheckpointError: ``source`` holds no model.
        UserInputError: ``target`` exists and is not empty.
    """
    model = find_model(source)
    target = Path(target).expanduser().resolve()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserInputError(f"{target} exists and is not empty. Name a new folder.")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        shutil.copytree(model, partial)
        os.replace(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _is_model(path: Path) -> bool:
    return (path / "config.json").is_file() and any(path.glob("*.safetensors"))
