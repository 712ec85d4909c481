"""The tuned examples: at the top of a clone, and inside the installed package."""

from __future__ import annotations

from pathlib import Path

import trial_ray


def examples_folder() -> Path:
    """The folder ``tuned_examples``: a wheel's own, else the one beside the package in a clone."""
    package = Path(trial_ray.__file__).parent
    packaged = package / "tuned_examples"
    return packaged if packaged.is_dir() else package.parent / "tuned_examples"


def experiment_file(name: str) -> Path:
    """The file that ``name`` means: a path, or the name of a tuned example (``alfworld_quickstart``).

    A file of that path comes first. Where there is neither, the path is returned as it is, to be complained about.
    """
    path, example = Path(name), examples_folder() / f"{name}.py"
    return example if not path.is_file() and not path.is_absolute() and example.is_file() else path
