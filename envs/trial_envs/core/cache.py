"""The package's cache folder, which holds indices and generated shops."""

from __future__ import annotations

import os
import tempfile
from functools import lru_cache
from pathlib import Path


def cache_folder() -> Path:
    """``trial_envs`` in ``XDG_CACHE_HOME`` or ``~/.cache``; if that is not writable, a temporary folder of the process."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "trial_envs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return _private_folder()
    return folder if os.access(folder, os.W_OK) else _private_folder()


def _private_folder() -> Path:
    return Path(_temporary_folder().name)


@lru_cache(maxsize=1)
def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """Cached, because the object removes its folder when it is collected."""
    return tempfile.TemporaryDirectory(prefix="trial_envs-")
