"""Save, verify, find, prune and export the checkpoints of a run; each has a manifest of its files."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from trial_ray.errors import CheckpointError
from trial_ray.files import (
    Json,
    checked_content,
    file_digest,
    nearest_folder,
    partial_of,
    read_json,
    require_new_folder,
    set_aside,
    write_folder,
    write_json,
)
from trial_ray.trust import is_signed, signature

MANIFEST = "manifest.json"
_MERGED = "hf"
"""Folder of the merged model (base model and adapter), which may be added to a saved checkpoint; it contains no pickles."""
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def write_manifest(folder: Path) -> None:
    """Write a signed manifest with size and SHA-256 of every file below ``folder``; all files are synced to disk on return."""
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST):
        files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": file_digest(path).hex()}
        _sync(path)
    write_json(folder / MANIFEST, {"files": files, "signature": signature(_canonical(files))})


def save_checkpoint(target: Path, save: Callable[[Path], object]) -> None:
    """Call ``save`` with a temporary folder, which then replaces ``target``, so that ``target`` is never incomplete."""
    partial = partial_of(target)
    try:
        partial.mkdir(parents=True)
        save(partial)
        write_manifest(partial)
        if target.exists():
            remove_checkpoint(target)
        os.replace(partial, target)
        _sync(target.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def require_whole(checkpoint: Path, below: Path | str = "") -> None:
    """Check that the files of a checkpoint have not changed since it was written; a checkpoint without a manifest passes.

    Args:
        checkpoint: the folder.
        below: folder inside the checkpoint; only the files below it are checked, or all files if it is empty.

    Raises:
        CheckpointError: a file is missing, or its size or content differs; the message names the first such file.
    """
    for name, entry in (_manifest(checkpoint) or {"files": {}})["files"].items():
        inside = not below or Path(name).is_relative_to(below)
        if inside and (damage := _damage(checkpoint / name, int(entry["bytes"]), str(entry["sha256"]))):
            raise CheckpointError(f"{checkpoint} is damaged: {name} {damage}. Take another checkpoint.")


def require_own(checkpoint: Path) -> None:
    """Check that this user wrote a checkpoint on this machine, because loading its pickles can run any code.

    Args:
        checkpoint: the folder; :func:`require_whole` must have checked all its files.

    Raises:
        CheckpointError: the manifest is missing or not signed by this user, or the checkpoint has a link or an unlisted file.
    """
    manifest = _manifest(checkpoint)
    if manifest is None:
        reason = f"it has no {MANIFEST}"
    elif not is_signed(_canonical(manifest["files"]), manifest.get("signature")):
        reason = f"its {MANIFEST} is not signed with the key of this user"
    elif unlisted := _unlisted_file(checkpoint, {MANIFEST, *manifest["files"]}):
        reason = f"{unlisted} was added to it"
    else:
        return
    raise CheckpointError(
        f"{checkpoint} has pickles, which can run any program, and may come from another user: {reason}. Give --trust if you know "
        "where it comes from. evaluate, export, inspect and report work without it: they load no pickles."
    )


def _manifest(checkpoint: Path) -> Json | None:
    """Return the checked content of the manifest; ``None`` if it is missing."""
    path = checkpoint / MANIFEST
    if not path.is_file():
        return None
    try:
        manifest = read_json(path)
        with checked_content(path):
            for name, entry in manifest["files"].items():
                int(entry["bytes"]), str(entry["sha256"])
                inside = PurePosixPath(name)
                if inside.is_absolute() or ".." in inside.parts or "\0" in name or not inside.parts:
                    raise ValueError(f"it lists {name!r}, which is not a file inside it")
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint} is damaged: {MANIFEST} cannot be read. {error}") from error
    return manifest


def _unlisted_file(checkpoint: Path, listed: set[str]) -> str:
    """Return the path of a link, or of a file that is not ``listed``; empty if there is neither."""
    for path in sorted(checkpoint.rglob("*")):
        inside = path.relative_to(checkpoint)
        merged = any(part.lstrip(".").partition(".")[0] == _MERGED for part in inside.parts[:-1])
        if path.is_symlink() or (path.is_file() and not merged and inside.as_posix() not in listed):
            return str(inside)
    return ""


def _canonical(files: Json) -> bytes:
    return json.dumps(files, sort_keys=True).encode()


def _damage(path: Path, size: int, digest: str) -> str:
    """Return a description of a file's damage; empty if the file is undamaged."""
    if not os.path.isfile(path):  # Path.is_file() raises an error if the name is too long.
        return "is missing"
    if (current := path.stat().st_size) != size:
        return f"has {current} bytes, {size} were written"
    return "" if file_digest(path).hex() == digest else "has other content than was written"


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


MODULE_INSIDE_CHECKPOINT = Path("learner_group/learner/rl_module/default_policy")
MODEL_INSIDE_CHECKPOINT = MODULE_INSIDE_CHECKPOINT / "hf"
ADAPTER_INSIDE_CHECKPOINT = MODULE_INSIDE_CHECKPOINT / "adapter"
ADAPTER_MARK = "adapter_config.json"
TOKENIZER_MARK = "tokenizer_config.json"
CHECKPOINT_EVERY = 10
"""Default number of iterations between checkpoints."""
CHECKPOINTS_KEPT = 2
"""Default number of newest checkpoints to keep."""
STOPPED = ".stopped"
"""Suffix of the checkpoint of a diverged policy, from which no run continues automatically."""
CHECKPOINT_MARK = "rllib_checkpoint.json"
RUN_FILE = "run.json"
RUN_SCHEMA = "trial_ray/run"
"""Schema name in the ``run.json`` of a run folder."""


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a ``checkpoints`` folder, oldest first."""
    if not folder.is_dir():
        return []
    complete = [path for path in folder.iterdir() if path.name.isdecimal() and (path / CHECKPOINT_MARK).is_file()]
    return sorted(complete, key=lambda path: int(path.name))


def prune_checkpoints(folder: Path, keep: int) -> None:
    """Keep the newest ``keep`` checkpoints; delete all others, and the unfinished checkpoints of killed runs."""
    for unfinished in folder.glob(".*.partial"):
        shutil.rmtree(unfinished, ignore_errors=True)
    for path in list_checkpoints(folder)[:-keep]:
        remove_checkpoint(path)


def remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint; it is renamed first, so a crash during deletion leaves no incomplete checkpoint under its name."""
    removed = path.rename(partial_of(path))
    shutil.rmtree(removed)


def newest_whole_checkpoint(folder: Path, *, trust: bool = False) -> tuple[Path | None, list[str]]:
    """Return the newest undamaged checkpoint in a ``checkpoints`` folder, and a description of the damage of each newer one.

    Damaged checkpoints are renamed, so that they are not used again. The result is ``(None, [])`` if there are no checkpoints.

    Args:
        folder: the ``checkpoints`` folder.
        trust: whether to accept a checkpoint that this user did not write on this machine.

    Raises:
        CheckpointError: all checkpoints are damaged, or the newest undamaged checkpoint may come from another user.
    """
    damages: list[str] = []
    for path in reversed(list_checkpoints(folder)):
        try:
            require_whole(path)
        except CheckpointError as error:
            damages.append(str(error))
            set_aside(path, "damaged")
            continue
        if not trust:
            require_own(path)
        return path, damages
    if damages:
        raise CheckpointError(f"No checkpoint in {folder} is complete. {' '.join(damages)} Start the run from scratch.")
    return None, damages


def _absolute(path: Path | str) -> Path:
    """Return ``path`` with links resolved, except a link with a checkpoint's name, such as ``000010``.

    In the folder of a Tune trial, checkpoints are links to folders with other names.
    """
    path = Path(path).expanduser()
    return path.parent.resolve() / path.name if path.name.isdecimal() else path.resolve()


def find_checkpoint(path: Path | str) -> Path:
    """Return the checkpoint at ``path``, or the newest checkpoint of the run folder at ``path``.

    Raises:
        CheckpointError: no checkpoint is found.
    """
    path = _absolute(path)
    if not path.is_dir():
        reason = "is a file" if path.exists() else "does not exist"
        raise CheckpointError(
            f"{path} {reason}.{nearest_folder(path)} Name a checkpoint, or a run folder that has one."
        )
    if (path / CHECKPOINT_MARK).is_file():
        return path
    checkpoints = list_checkpoints(path / "checkpoints") or list_checkpoints(path)
    if not checkpoints:
        raise CheckpointError(f"{path} has no complete checkpoint. Name a checkpoint, or a run folder that has one.")
    return checkpoints[-1]


def find_model(path: Path | str) -> Path:
    """Return the model folder for ``path``.

    For a checkpoint with an adapter, the merged model is written once, next to the adapter.

    Args:
        path: a model folder, a checkpoint, a run folder, ``package:NAME``, or the name of a model on the Hugging Face hub. A
            path ``NAME/NAME`` is a name on the hub, unless the first part is ``runs`` or an existing folder.

    Raises:
        CheckpointError: no model is found, the model is incomplete or damaged, or the base model of an adapter is missing.
        ConfigError: there is no packaged model, or no model on the hub, with this name.
    """
    name, parent = str(path), Path(path).parent
    if name.startswith("package:"):
        from trial_ray.models.folders import packaged_folder  # Import torch only if needed.

        return packaged_folder(name)
    if _HUB_NAME.fullmatch(name) and not parent.exists() and parent.name != "runs":
        from trial_ray.models.folders import model_folder

        return Path(model_folder(name))
    path = _absolute(path)
    if _is_model(path):
        return path
    checkpoint = find_checkpoint(path)
    model, adapter = checkpoint / MODEL_INSIDE_CHECKPOINT, checkpoint / ADAPTER_INSIDE_CHECKPOINT
    if not _is_model(model) and (adapter / ADAPTER_MARK).is_file():
        require_whole(checkpoint, ADAPTER_INSIDE_CHECKPOINT)
        try:
            write_folder(model, lambda partial: _merge(adapter, partial))
        except OSError:
            if not _is_model(model):  # If the model exists, another command has written it meanwhile.
                raise
    else:
        require_whole(checkpoint, MODEL_INSIDE_CHECKPOINT)
    if not _is_model(model):
        raise CheckpointError(f"{model} lacks config.json or *.safetensors: the checkpoint is incomplete.")
    return model


def find_tokenizer(path: Path | str) -> Path:
    """Return the folder of the policy's tokenizer inside the checkpoint or run folder ``path``.

    Raises:
        CheckpointError: no checkpoint is found, or it has no tokenizer.
    """
    checkpoint = find_checkpoint(path)
    for inside in (MODEL_INSIDE_CHECKPOINT, ADAPTER_INSIDE_CHECKPOINT):
        if (checkpoint / inside / TOKENIZER_MARK).is_file():
            return checkpoint / inside
    raise CheckpointError(f"{checkpoint} has no tokenizer: the checkpoint is incomplete.")


def find_adapter(path: Path | str) -> Path:
    """Return the folder of the LoRA adapter, in peft's format, inside the checkpoint or run folder ``path``.

    Raises:
        CheckpointError: no checkpoint is found, or it contains a full model instead of an adapter.
    """
    adapter = find_checkpoint(path) / ADAPTER_INSIDE_CHECKPOINT
    if not (adapter / ADAPTER_MARK).is_file():
        raise CheckpointError(
            f"{adapter} does not exist: the run trained all weights (lora_rank=None). Export the model."
        )
    return adapter


def find_run(path: Path) -> tuple[Path | None, int | None]:
    """Return the run folder that is or contains ``path``, found by its ``run.json``, and the iteration of the checkpoint.

    Both are ``None`` if there is no run folder. The iteration is also ``None`` if ``path`` is not in a checkpoint.

    Args:
        path: absolute path of a model, as :func:`find_model` returns it.
    """
    resolved = path.resolve()
    run = next((folder for folder in (resolved, *resolved.parents) if _is_run(folder / RUN_FILE)), None)
    saved = run and re.match("checkpoints/([0-9]+)", path.relative_to(run).as_posix())
    return run, int(saved[1]) if saved else None


def _is_run(file: Path) -> bool:
    # Search the text without parsing it: a damaged run.json must be reported later, not ignored.
    return file.is_file() and f'"{RUN_SCHEMA}"' in file.read_text(encoding="utf-8", errors="replace")


def export_model(source: Path | str, target: Path | str, *, adapter: bool = False) -> Path:
    """Copy the model out of a checkpoint into the new folder ``target``, with a generation config that has only token ids.

    Args:
        source: a checkpoint or run folder; without ``adapter`` also a model folder.
        target: the new folder.
        adapter: whether to copy only the LoRA adapter, in peft's format, not the merged model.

    Raises:
        CheckpointError: ``source`` has no model or no adapter, or is a checkpoint with a link, which could point to any file.
        UserInputError: ``target`` is a file or is not empty.
    """
    folder, path = find_adapter(source) if adapter else find_model(source), Path(source).expanduser()
    # Links are rejected in checkpoints only: a model folder in the hub's cache consists of links.
    link = next((file for file in folder.rglob("*") if file.is_symlink()), None)
    if link is not None and path.exists() and folder != path.resolve():
        raise CheckpointError(
            f"{link} is a link, which a checkpoint may not contain. Remove it, or replace it with its target."
        )
    target = Path(target).expanduser().resolve()
    require_new_folder(target)
    write_folder(target, lambda partial: _copy_model(folder, partial))
    return target


def _copy_model(source: Path, target: Path) -> None:
    from trial_ray.models.folders import GENERATION_CONFIG, write_generation_config

    shutil.copytree(source, target)
    # Another version of this package may have written a generation config with more settings.
    if (file := target / GENERATION_CONFIG).is_file():
        write_generation_config(read_json(file), target)


def _merge(adapter: Path, target: Path) -> None:
    from trial_ray.models.lora import merge_adapter

    merge_adapter(adapter, target)
    for file in adapter.iterdir():
        if not file.name.startswith("adapter_") and file.name != "README.md":  # the tokenizer's files
            shutil.copy2(file, target)


def _is_model(path: Path) -> bool:
    return (path / "config.json").is_file() and any(path.glob("*.safetensors"))
