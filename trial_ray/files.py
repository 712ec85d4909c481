"""Files and folders that are either whole or absent: written under another name, then renamed."""

from __future__ import annotations

import json
import math
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trial_ray.errors import UserInputError


def write_text(path: Path | str, text: str) -> Path:
    """Write ``text`` to ``path`` so that a reader, or a crash half-way, never meets a part of it.

    Raises:
        UserInputError: ``path`` is a folder or a device, which a file would replace.
    """
    path = Path(path)
    if not path.name or (path.exists() and not path.is_file()):
        raise UserInputError(f"{str(path)!r} is no file that can be written. Name a file.")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        # UTF-8 has no form for lone surrogates; the escape that stands for one is JSON's, too.
        with open(partial, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def write_json(path: Path | str, value: Any) -> Path:
    """Write ``value`` as indented strict JSON (NaN is refused: other readers could not parse it)."""
    return write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_lines(path: Path) -> list[str]:
    """Lines of a file that a crash may have cut or damaged: bytes that are no UTF-8 are replaced, so that the other lines stay."""
    return path.read_text(encoding="utf-8", errors="replace").splitlines()


def make_folder(path: Path) -> None:
    """Make a folder for results, before what they cost is spent.

    Raises:
        UserInputError: it cannot be made, or not be written into.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserInputError(f"The folder {path} cannot be made ({error.strerror}). Name another one.") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise UserInputError(f"The folder {path} cannot be written into. Name another one, or change its permissions.")


def finite(value: Any) -> Any:
    """The value with ``None`` for each number that is not finite, which strict JSON has no form for."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def require_new_folder(folder: Path) -> None:
    """Refuse the name of a folder that :func:`write_folder` could not make.

    Raises:
        UserInputError: the folder holds something, or it, or one that it lies in, is a file.
    """
    file = next((each for each in (folder, *folder.parents) if each.is_file()), None)
    if file is not None or (folder.is_dir() and any(folder.iterdir())):
        raise UserInputError(f"{file or folder} is {'a file' if file else 'not empty'}. Name a new folder.")


def write_folder(folder: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` make a new folder, which appears as ``folder`` only once it is complete."""
    folder = folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        write(partial)
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
