"""Python files that the user wrote: their errors are the user's to mend, and are told with file and line."""

from __future__ import annotations

import contextlib
import runpy
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trial_ray.errors import TrialRayError, UserInputError


@contextlib.contextmanager
def running_user_file(path: Path) -> Iterator[None]:
    """Turn what the file raises while it runs into a ``UserInputError`` that names its line."""
    try:
        yield
    except TrialRayError:
        raise
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = error.lineno if isinstance(error, SyntaxError) else frames[-1].lineno if frames else "?"
        raise UserInputError(f"{path}, line {line}: {type(error).__name__}: {error}") from error


def run_user_file(path: Path, name: str) -> dict[str, Any]:
    """Run the file as Python runs a script, so that it can import modules beside it; returns what it defines.

    Args:
        path: of the file.
        name: its ``__name__`` meanwhile.

    Raises:
        UserInputError: the file fails.
    """
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        with running_user_file(path):
            return runpy.run_path(str(path), run_name=name)
    finally:
        sys.path.remove(folder)
