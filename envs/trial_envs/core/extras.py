"""The command that installs an optional dependency."""

from __future__ import annotations

import re
from importlib import metadata

DISTRIBUTIONS = ("trial-envs", "trial-ray")


def install_command(extra: str) -> str:
    """Return a ``pip install`` command that names the packages of an extra, because this project is not on a package index.

    Args:
        extra: name of an extra in ``setup.py``.
    """
    for name in DISTRIBUTIONS:
        try:
            required = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        packages = [
            package.partition(";")[0].strip()
            for package in required
            if re.search(rf"""extra == ["']{extra}["']""", package)
        ]
        if packages:
            return "pip install " + " ".join(f"'{package}'" for package in packages)
    return f"pip install '.[{extra}]' in a clone"
