"""What a complete checkpoint consists of, so that a damaged one is never taken for it."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path, PurePosixPath
from typing import Any

from trial_ray.errors import CheckpointError
from trial_ray.experiments.provenance import is_signed, signature
from trial_ray.files import write_json

MANIFEST = "manifest.json"
_MERGED = "hf"
"""Folder of the model that an adapter makes, which is added to a checkpoint later; it holds no pickles."""


def write_manifest(folder: Path) -> None:
    """Note size and SHA-256 of every file below ``folder``, signed; all of them are on the disk when this returns."""
    files = {}
    for path in _files(folder):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": digest}
    write_json(folder / MANIFEST, {"files": files, "signature": signature(_canonical(files))})


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
    manifest = _manifest(checkpoint)
    for name, (size, digest) in _listed(checkpoint, manifest).items() if manifest is not None else ():
        if below and not Path(name).is_relative_to(below):
            continue
        if damage := _damage(checkpoint / name, size, digest):
            raise CheckpointError(f"{checkpoint} is damaged: {name} {damage}. Take another checkpoint.")


def require_own(checkpoint: Path) -> None:
    """Check that this user wrote a checkpoint on this machine, so that loading its pickles runs nobody else's program.

    Args:
        checkpoint: the folder, of which :func:`require_whole` has checked all files.

    Raises:
        CheckpointError: its manifest is missing or bears no signature of this user's, or it holds other files than that lists.
    """
    manifest = _manifest(checkpoint)
    if manifest is None:
        reason = f"it has no {MANIFEST}"
    elif not is_signed(_canonical(manifest["files"]), manifest.get("signature")):
        reason = f"its {MANIFEST} is not signed with the key of this user"
    elif foreign := _foreign(checkpoint, set(manifest["files"])):
        reason = f"{foreign} was added to it"
    else:
        return
    raise CheckpointError(
        f"{checkpoint} holds pickles, which can run any program, and may be of somebody else: {reason}. Give --trust if you know "
        "where it comes from. To play, copy or read what it holds (evaluate, export, inspect, report), none are loaded."
    )


def _manifest(checkpoint: Path) -> dict[str, Any] | None:
    path = checkpoint / MANIFEST
    if not path.is_file():
        return None
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(manifest, dict) or not isinstance(manifest["files"], dict):
            raise TypeError("no list of files")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{checkpoint} is damaged: {MANIFEST} cannot be read ({error!r}).") from error
    return manifest


def _listed(checkpoint: Path, manifest: dict[str, Any]) -> dict[str, tuple[int, str]]:
    """Size and digest of the files by name."""
    try:
        files = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in manifest["files"].items()}
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise CheckpointError(f"{checkpoint} is damaged: {MANIFEST} cannot be read ({error!r}).") from error
    if outside := [name for name in files if _leaves(name)]:
        raise CheckpointError(f"{checkpoint} is damaged: {MANIFEST} lists {outside[0]!r}, which is no file inside it.")
    return files


def _leaves(name: str) -> bool:
    path = PurePosixPath(name)
    return path.is_absolute() or ".." in path.parts or "\0" in name or not path.parts


def _foreign(checkpoint: Path, listed: set[str]) -> str:
    """A file that the manifest does not list, or a link, behind which others could lie; empty where there is none."""
    for path in sorted(checkpoint.rglob("*")):
        inside = path.relative_to(checkpoint)
        if path.is_symlink():
            return str(inside)
        merged = any(part.lstrip(".").partition(".")[0] == _MERGED for part in inside.parts[:-1])
        if path.is_file() and not merged and inside.as_posix() not in listed | {MANIFEST}:
            return str(inside)
    return ""


def _canonical(files: dict[str, Any]) -> bytes:
    return json.dumps(files, sort_keys=True).encode()


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
