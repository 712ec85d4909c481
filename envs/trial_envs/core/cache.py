"""The cache folder of ``trial_envs``: search indices, generated shops and an index of packed ALFWorld games."""

from __future__ import annotations

import os
from pathlib import Path

from trial_envs.core.forks import ProcessFolder

_TEMPORARY = ProcessFolder()


def cache_folder() -> Path:
    """Return the folder ``trial_envs`` in ``XDG_CACHE_HOME`` or ``~/.cache``, or a temporary folder if that is not writable."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "trial_envs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return _TEMPORARY.path()
    return folder if os.access(folder, os.W_OK) else _TEMPORARY.path()
