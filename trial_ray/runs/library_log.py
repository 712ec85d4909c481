"""The file that takes what Ray, the engines and other libraries write, so that the terminal shows the run's own lines."""

from __future__ import annotations

import ctypes
import io
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

STDOUT, STDERR = 1, 2
LOG_FILE = Path("logs", "libraries.log")
"""In the folder of a run or sweep."""


@contextmanager
def library_log(path: Path, console: Console) -> Iterator[None]:
    """Append what this process and its children write to stdout and stderr to a file; ``console`` prints as before.

    The descriptors are redirected and not ``sys.stdout``, because Ray's C++ core and the processes that it starts write to
    the descriptors. Warnings of this package go to the console too. An exception that ends the context gets a note that
    names the file, if there still is one.

    Args:
        path: its folder is made if it is missing.
        console: on the process's stdout. One that prints elsewhere, as a test's does, is left as it is.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as restored:
        _flush()
        # Python's duplicates are closed in child processes: a daemon that outlives the command holds no terminal or pipe.
        terminal = {number: os.dup(number) for number in (STDOUT, STDERR)}
        for number, copy in terminal.items():
            restored.callback(os.close, copy)
            restored.callback(os.dup2, copy, number)
        restored.callback(_flush)
        if _is_on_stdout(console):
            restored.callback(setattr, console, "file", console.file)
            console.file = restored.enter_context(
                open(
                    terminal[STDOUT],
                    "w",
                    encoding=getattr(console.file, "encoding", None),
                    errors="replace",
                    closefd=False,
                )
            )
        warnings = _ConsoleHandler(console)
        logging.getLogger("trial_ray").addHandler(warnings)
        restored.callback(logging.getLogger("trial_ray").removeHandler, warnings)
        with open(path, "ab") as file:
            for number in terminal:
                os.dup2(file.fileno(), number)
        try:
            yield
        except Exception as error:
            if path.exists():
                error.add_note(f"what Ray, the engines and other libraries wrote: {path}")
            raise


class _ConsoleHandler(logging.Handler):
    """Prints warnings where the run's own lines are printed."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        from rich.markup import escape

        from trial_ray.reports.recorded import visible

        self._console.print(
            f"[yellow]warning:[/] {escape(visible(record.getMessage()))}", highlight=False, soft_wrap=True
        )


def _is_on_stdout(console: Console) -> bool:
    try:
        return console.file.fileno() == STDOUT
    except (OSError, ValueError, AttributeError):  # a file in memory has no descriptor
        return False


def _flush() -> None:
    """Write out what Python and C still buffer, so that it reaches the file it was written for."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOBase) and not stream.closed:
            stream.flush()
    ctypes.CDLL(None).fflush(None)
