"""The cache folder of ``trial_envs``, which contains search indices and generated shops."""

from __future__ import annotations

import os
from pathlib import Path

from trial_envs.core.forks import ProcessFolder

_TEMPORARY = ProcessFolder()


def cache_folder() -> Path:
    """Return the folder ``trial_envs`` in ``XDG_CACHE_HOME`` or ``~/.cache``; a temporary folder if it is not writable."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "trial_envs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return _TEMPORARY.path()
    return folder if os.access(folder, os.W_OK) else _TEMPORARY.path()
