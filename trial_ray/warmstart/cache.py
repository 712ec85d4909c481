"""The cache of warm starts, and the examples kept in it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trial_ray.rollout.partitions import IDS, new_schema, read_rows, write_rows
from trial_ray.warmstart.cloning import Example

CACHE_VARIABLE = "TRIAL_RAY_CACHE"


def cache_root() -> Path:
    """``TRIAL_RAY_CACHE``, else ``~/.cache/trial_ray``."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "trial_ray").expanduser()


def content_key(content: Mapping[str, Any]) -> str:
    """SHA-256 (hexadecimal, 24 digits) of plain values; equal values give equal keys, whatever their order."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, allow_nan=False).encode()).hexdigest()[:24]


def files_digest(files: Iterable[Path]) -> str:
    """SHA-256 (hexadecimal) of names and contents of files, wherever their folders are."""
    entries = sorted(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest() for path in files)
    return hashlib.sha256(b"".join(entries)).hexdigest()


def get_or_build(kind: str, key: str, build: Callable[[Path], None]) -> tuple[Path, bool]:
    """The folder ``<cache>/<kind>/<key>``, built if it is not there.

    ``build`` fills a folder beside it, which takes its name in one step when it is complete: an interrupted build
    leaves nothing under the key. Of two that build at the same time, the first to finish gives its folder to both.

    Returns:
        The folder, and whether it was there already.
    """
    folder = cache_root() / kind / key
    if folder.is_dir():
        return folder, True
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{key}.", dir=folder.parent))
    try:
        build(work)
        work.chmod(0o755)
        _move_into_place(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder, False


def _move_into_place(work: Path, folder: Path) -> None:
    try:
        work.rename(folder)
    except OSError:
        # A rename onto a folder that holds files fails: somebody else finished first, with the same content.
        if not folder.is_dir():
            raise


SCHEMA = new_schema(
    (("prompt_ids", IDS, "the prompt, `[P]`"), ("response_ids", IDS, "the demonstrated response, `[y]`")), version=1
)


def kept_examples(key: str, make: Callable[[], Sequence[Example]]) -> list[Example]:
    """The examples of a warm start in their order: those kept under ``key``, else made, and kept once there are all of them.

    Args:
        key: of everything that decides the examples.
        make: collects them.

    Raises:
        UserInputError: a kept file is damaged.
    """
    folder, _ = get_or_build("demonstrations", key, lambda work: _write(work, make()))
    columns = read_rows(folder, None, SCHEMA, "demonstrations", f"Remove {folder}: they are collected again.")
    prompts, responses = (columns[name].to_pylist() for name in SCHEMA.names)
    return [
        Example(np.array(prompt, np.int32), np.array(response, np.int32))
        for prompt, response in zip(prompts, responses, strict=True)
    ]


def _write(folder: Path, examples: Sequence[Example]) -> None:
    rows = [{"prompt_ids": each.prompt_ids, "response_ids": each.response_ids} for each in examples]
    write_rows(folder, 0, rows, SCHEMA, "demonstrator")
