"""Loads Python files of the user: errors name file and line, and definitions are pickled by value for actors.

Actors cannot import a user's file, or modules and packages next to it or in folders that it adds to ``sys.path``; their classes
and functions are sent by value.
"""

from __future__ import annotations

import contextlib
import importlib.util
import runpy
import sys
import traceback
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from types import ModuleType
from typing import Any

from trial_ray.errors import ConfigError, TrialRayError, UserInputError

_PREFIX = "trial_ray_user_file_"
"""Prefix of the names of modules loaded from a user's file."""


def run_user_file(path: Path, name: str) -> dict[str, Any]:
    """Run a file as a Python script that can import modules next to it, and return the names that it defines.

    Args:
        path: the file.
        name: value of ``__name__`` in the file.

    Raises:
        UserInputError: the file raises an error; the message names the line.
    """
    with _running(path):
        return runpy.run_path(str(path), run_name=name)


def load_user_module(path: Path, expected: str) -> ModuleType:
    """Import a user's file, once; its classes and functions can be sent to actors.

    Args:
        path: the file.
        expected: name that the file must define, for the error message.

    Raises:
        ConfigError: the file does not exist, or is not a Python file.
        UserInputError: the file raises an error; the message names the line.
    """
    from ray import cloudpickle

    path = path.expanduser().resolve()
    name = _PREFIX + path.stem
    loaded = sys.modules.get(name)
    if loaded is not None and loaded.__file__ == str(path):
        return loaded
    if not path.is_file():
        raise ConfigError(f"There is no file {path}; give the path of a Python file that defines {expected}.")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file (.py); give one that defines {expected}.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _running(path):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    cloudpickle.register_pickle_by_value(module)
    return module


@contextlib.contextmanager
def _running(path: Path) -> Iterator[None]:
    """Make modules next to a file importable inside the context, and add the line of the file to errors."""
    folder = str(path.resolve().parent)
    before, known = set(sys.modules), set(sys.path)
    sys.path.insert(0, folder)
    try:
        yield
    except TrialRayError as error:
        error.add_note(f"in {path}, line {_line(error, path)}")
        raise
    except Exception as error:
        raise UserInputError(f"{path}, line {_line(error, path)}: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(folder)
        _send_by_value(before, {Path(entry).resolve() for entry in {folder, *sys.path} - known | {folder}})


def _line(error: Exception, path: Path) -> int | str:
    """Return the line of the file at which the error was raised; ``"?"`` if it is unknown."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return error.lineno or "?"
    return (frames[-1].lineno if frames else None) or "?"


def _send_by_value(before: set[str], folders: set[Path]) -> None:
    """Pickle modules by value if their names are not in ``before`` and their files or packages are in ``folders``."""
    from ray import cloudpickle

    installed = None
    for name in sorted(set(sys.modules) - before):
        package = name.partition(".")[0]
        module = sys.modules.get(package)
        file = next(iter(getattr(module, "__path__", ())), None) or getattr(module, "__file__", None)
        if package in before or file is None:
            continue
        if Path(file).resolve().parent in folders:
            installed = packages_distributions() if installed is None else installed
            if package not in installed:  # Actors can import installed packages.
                cloudpickle.register_pickle_by_value(sys.modules[name])
