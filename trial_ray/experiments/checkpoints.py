"""Where checkpoints and the models inside them lie."""

from __future__ import annotations

import re
import shutil
import uuid
from pathlib import Path

from trial_ray.errors import CheckpointError
from trial_ray.experiments.checkpoint_manifest import require_own, require_whole
from trial_ray.files import require_new_folder, write_folder

MODULE_INSIDE_CHECKPOINT = Path("learner_group/learner/rl_module/default_policy")
MODEL_INSIDE_CHECKPOINT = MODULE_INSIDE_CHECKPOINT / "hf"
ADAPTER_INSIDE_CHECKPOINT = MODULE_INSIDE_CHECKPOINT / "adapter"
ADAPTER_MARK = "adapter_config.json"
TOKENIZER_MARK = "tokenizer_config.json"
CHECKPOINT_EVERY = 10
"""Iterations between checkpoints, unless a user says otherwise."""
CHECKPOINTS_KEPT = 2
"""How many of the newest are kept, unless a user says otherwise."""
CHECKPOINT_MARK = "rllib_checkpoint.json"
RUN_SCHEMA = "trial_ray/run"
"""In the ``run.json`` of a run folder."""


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints in a ``checkpoints`` folder, oldest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if path.name.isdecimal() and (path / CHECKPOINT_MARK).is_file()]
    return sorted(found, key=lambda path: int(path.name))


def prune_checkpoints(folder: Path, keep: int) -> None:
    """Delete all but the newest ``keep`` checkpoints."""
    for path in list_checkpoints(folder)[:-keep]:
        remove_checkpoint(path)


def remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint; it loses its name first, so that a crash half-way leaves none that lacks files."""
    removed = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
    path.rename(removed)
    shutil.rmtree(removed)


def newest_whole_checkpoint(folder: Path, *, trust: bool = False) -> tuple[Path | None, list[str]]:
    """The newest checkpoint in a ``checkpoints`` folder that is not damaged, and what is wrong with those after it.

    Damaged ones are renamed, so that nothing takes them for checkpoints any more.

    Args:
        folder: of the checkpoints.
        trust: take one that this user did not write on this machine, too.

    Raises:
        CheckpointError: all of them are damaged, or the newest whole one may be of somebody else.
    """
    damages: list[str] = []
    for path in reversed(list_checkpoints(folder)):
        try:
            require_whole(path)
        except CheckpointError as error:
            damages.append(str(error))
            path.rename(path.with_name(f"{path.name}.damaged-{uuid.uuid4().hex[:8]}"))
            continue
        if not trust:
            require_own(path)
        return path, damages
    if damages:
        raise CheckpointError(f"No checkpoint in {folder} is whole. {' '.join(damages)} Begin the run again.")
    return None, damages


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

    A checkpoint that holds an adapter is given the model that the adapter makes, once, beside it.

    Raises:
        CheckpointError: there is none, it is incomplete or damaged, or it is an adapter whose base model is missing.
    """
    path = Path(path).expanduser().resolve()
    if _is_model(path):
        return path
    checkpoint = find_checkpoint(path)
    model, adapter = checkpoint / MODEL_INSIDE_CHECKPOINT, checkpoint / ADAPTER_INSIDE_CHECKPOINT
    if not _is_model(model) and (adapter / ADAPTER_MARK).is_file():
        require_whole(checkpoint, ADAPTER_INSIDE_CHECKPOINT)
        try:
            write_folder(model, lambda partial: _merge(adapter, partial))
        except OSError:
            if not _is_model(model):  # else another command made it meanwhile
                raise
    else:
        require_whole(checkpoint, MODEL_INSIDE_CHECKPOINT)
    if not _is_model(model):
        raise CheckpointError(f"{model} lacks config.json or *.safetensors: the checkpoint is incomplete.")
    return model


def find_tokenizer(path: Path | str) -> Path:
    """The folder inside the checkpoint or run folder ``path`` that holds the policy's tokenizer.

    Raises:
        CheckpointError: there is no checkpoint, or none in it.
    """
    checkpoint = find_checkpoint(path)
    for inside in (MODEL_INSIDE_CHECKPOINT, ADAPTER_INSIDE_CHECKPOINT):
        if (checkpoint / inside / TOKENIZER_MARK).is_file():
            return checkpoint / inside
    raise CheckpointError(f"{checkpoint} holds no tokenizer: the checkpoint is incomplete.")


def find_adapter(path: Path | str) -> Path:
    """The adapter, in peft's format, inside the checkpoint or run folder ``path``.

    Raises:
        CheckpointError: there is no checkpoint, or it holds a whole model.
    """
    adapter = find_checkpoint(path) / ADAPTER_INSIDE_CHECKPOINT
    if not (adapter / ADAPTER_MARK).is_file():
        raise CheckpointError(
            f"{adapter} does not exist: the run trained all weights (lora_rank=None). Export the model."
        )
    return adapter


def find_run_folder(path: Path | str) -> Path | None:
    """The run folder that ``path`` is or lies in, told by the schema in its ``run.json``; ``None`` where there is none."""
    path = Path(path).expanduser().resolve()
    return next((folder for folder in (path, *path.parents) if _is_run(folder / "run.json")), None)


def _is_run(file: Path) -> bool:
    # As a text, because a damaged record is to be reported, not passed over.
    return file.is_file() and f'"{RUN_SCHEMA}"' in file.read_text(encoding="utf-8", errors="replace")


def checkpoint_iteration(path: Path, run: Path) -> int | None:
    """The iteration of the checkpoint of ``run`` that ``path`` is or lies in; ``None`` where it lies in none."""
    inside = path.relative_to(run).parts
    name = re.match("[0-9]+", inside[1]) if len(inside) > 1 and inside[0] == "checkpoints" else None
    return int(name[0]) if name else None


def export_model(source: Path | str, target: Path | str, *, adapter: bool = False) -> Path:
    """Copy the model out of a checkpoint into the new folder ``target``.

    Args:
        source: a checkpoint or run folder; without ``adapter`` also a model folder.
        target: the new folder.
        adapter: whether to copy the adapter alone, in peft's format, instead of the model that it makes.

    Raises:
        CheckpointError: ``source`` holds no model, or no adapter.
        UserInputError: ``target`` is a file or is not empty.
    """
    found = find_adapter(source) if adapter else find_model(source)
    target = Path(target).expanduser().resolve()
    require_new_folder(target)
    write_folder(target, lambda partial: shutil.copytree(found, partial))
    return target


def _merge(adapter: Path, target: Path) -> None:
    from trial_ray.models.merging import merge_adapter

    merge_adapter(adapter, target)
    for file in adapter.iterdir():
        if not file.name.startswith("adapter_") and file.name != "README.md":  # the tokenizer's
            shutil.copy2(file, target)


def _is_model(path: Path) -> bool:
    return (path / "config.json").is_file() and any(path.glob("*.safetensors"))
