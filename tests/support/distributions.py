"""The files of packages, a copy of what a build reads, and commands in other folders."""

import shutil
from pathlib import Path

from commands import completed, environment

ROOT = Path(__file__).parents[2]


def copy_sources(folder):
    """Create the folder with a copy of what a build reads, because a build writes into its source; return the folder."""
    for name in ("trial_ray", "envs", "tuned_examples"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


def files_of(package):
    """Return the files of a package, caches excepted, as paths below its folder."""
    files = (file for file in package.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    return [file.relative_to(package) for file in files]


def run(line, *arguments, folder):
    """Run a command in a folder, without this process's settings of Python and Ray, and return what it printed."""
    done = completed([*line.split(), *arguments], cwd=folder, env=environment("RAY_", "PYTHON"))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
