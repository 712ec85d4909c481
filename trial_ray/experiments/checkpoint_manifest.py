"""What a complete checkpoint consists of, so that a damaged one is never taken for it."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from trial_ray.errors import CheckpointError
from trial_ray.files import write_json

MANIFEST = "manifest.json"


def write_manifest(folder: Path) -> None:
    """Note size and SHA-256 of every file below ``folder``; all of them are on the disk when this returns."""
    files = {}
    for path in _files(folder):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": digest}
    write_json(folder / MANIFEST, {"files": files})


def name_checkpoint(partial: Path, target: Path) -> None:
    """Give a complete folder its name, in place of one that had it before."""
    os.replace(partial, target)
    _sync(target.parent)


def require_whole(checkpoint: Path, below: Path | str = "") -> None:
    """Check that the files of a checkpoint are those that were written; one without a manifest is taken as it is.

    Args:
        checkpoint: the folder.
        below: only files below this folder of it.

    Raises:
        CheckpointError: a file is missing, has another size or other content; names the first.
    """
    manifest = checkpoint / MANIFEST
    if not manifest.is_file():
        return
    try:
        files: dict[str, dict[str, Any]] = json.loads(manifest.read_text(encoding="utf-8"))["files"]
        expected = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{checkpoint} is damaged: {MANIFEST} cannot be read ({error!r}).") from error
    for name, (size, digest) in expected.items():
        if below and not Path(name).is_relative_to(below):
            continue
        if damage := _damage(checkpoint / name, size, digest):
            raise CheckpointError(f"{checkpoint} is damaged: {name} {damage}. Take another checkpoint.")


def _damage(path: Path, size: int, digest: str) -> str:
    """What is wrong with a file; empty where nothing is."""
    if not path.is_file():
        return "is missing"
    if (found := path.stat().st_size) != size:
        return f"has {found} bytes, {size} were written"
    with path.open("rb") as file:
        same = hashlib.file_digest(file, "sha256").hexdigest() == digest
    return "" if same else "has other content than was written"


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
