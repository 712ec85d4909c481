"""Python files that the user wrote: their errors are the user's to mend, and are told with file and line."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path

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
