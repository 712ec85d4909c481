"""Which failures of a run are answered by beginning again from its newest checkpoint, and the record of each."""

from __future__ import annotations

import traceback
from pathlib import Path

from ray.exceptions import RayError, RayTaskError

from trial_ray.errors import (
    EnvironmentFaultError,
    InfrastructureError,
    TrainingDivergedError,
    is_user_error,
    root_cause,
)
from trial_ray.files import write_text


def is_recoverable(error: Exception) -> bool:
    """Whether new actors may do what these could not: a process, a node or a transfer failed.

    What the input, an environment, the numbers or this package's own code did wrong would come again.
    """
    cause = root_cause(error)
    if is_user_error(error) or isinstance(cause, TrainingDivergedError | EnvironmentFaultError):
        return False
    return isinstance(cause, InfrastructureError) or (
        isinstance(error, RayError) and not isinstance(error, RayTaskError)
    )


def first_line(error: Exception) -> str:
    """What an error says, in a line."""
    cause = root_cause(error)
    return (str(cause).strip() or type(cause).__name__).splitlines()[0].rstrip(".")


def record_restart(folder: Path, line: str, error: Exception) -> Path:
    """Keep in ``folder`` why a run began again: the line that was printed, and the traceback."""
    number = len(list(folder.glob("restart-*.log"))) + 1
    return write_text(folder / f"restart-{number}.log", f"{line}\n\n{''.join(traceback.format_exception(error))}")
