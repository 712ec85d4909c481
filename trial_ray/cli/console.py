"""Consoles for stdout and stderr, error messages, exit codes, and the classes and functions that declare commands."""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import shtab

from trial_ray.algorithms.methods import method_names
from trial_ray.errors import TrialRayError, is_user_error, root_cause
from trial_ray.files import visible
from trial_ray.runs.experiment import experiment_file
from trial_ray.runs.storage import URI, StoredCopy
from trial_ray.runs.terminal import say

if TYPE_CHECKING:
    from rich.console import Console

DONE, FAILED, USER_ERROR, INTERRUPTED = 0, 1, 2, 130

# -- output and error messages -----------------------------------------------------------------------------------------


def output() -> Console:
    """Return the console for results and progress: rich's global console, so all output of a command is in order."""
    import rich

    # If stdout is a file, rich would assume 80 columns and truncate tables. sys.stdout is None if it was closed.
    rich.reconfigure(width=None if sys.stdout is not None and sys.stdout.isatty() else 140)
    return rich.get_console()


def print_table(title: str, headers: Iterable[str], rows: Iterable[Iterable[object]], **options: Any) -> None:
    """Print a table on :func:`output`.

    Args:
        title: title above the table.
        headers: headers of the columns; a leading ``>`` justifies the column to the right.
        rows: cells of the rows.
        options: keyword arguments of rich's ``Table``.
    """
    from rich.table import Table

    table = Table(title=title, title_justify="left", **options)
    for header in headers:
        table.add_column(header.lstrip(">"), justify="right" if header.startswith(">") else "left")
    for row in rows:
        table.add_row(*map(str, row))
    output().print(table)


def errors() -> Console:
    """Return a console for errors, on standard error."""
    from rich.console import Console

    return Console(stderr=True, soft_wrap=True)


def report(error: Exception, verbose: bool) -> int:
    """Print an error on stderr, with ``verbose`` also its traceback, and return the exit code."""
    console = errors()
    if verbose:
        import traceback

        say(console, "".join(traceback.format_exception(error)))
    user = is_user_error(error)
    cause = root_cause(error)
    text, hint = str(cause).strip() or type(cause).__name__, ""
    if not (user or isinstance(cause, TrialRayError)):
        text = f"{type(cause).__name__}: {text.splitlines()[0]}"
        hint = "" if verbose else " (--verbose shows the traceback)"
    console.print("error:" if user else "failed:", style="bold red", end=" ")
    say(console, visible(text) + hint)
    for note in getattr(error, "__notes__", ()):
        say(console, visible(note))
    return USER_ERROR if user else FAILED


# -- declaration of commands and arguments -----------------------------------------------------------------------------

Argument = Callable[[Any], Any]
"""Function that adds one or more arguments to a parser or to an argument group."""
COMPLETED = {
    **dict.fromkeys(("FILE", "FILE.py", "CHECKPOINT", "CHECKPOINT|oracle"), shtab.FILE),
    **dict.fromkeys(("DIR", "RUN", "PATH"), shtab.DIRECTORY),
}
"""Kind of shell completion by metavar; shtab completes choices automatically."""


class Suggested(list[str]):
    """Values that the shell completes; argparse accepts other values as well."""

    def __contains__(self, value: object) -> bool:
        return True


@dataclass(frozen=True)
class Command:
    """A subcommand of ``trial-ray``.

    Attributes:
        help: short description for the list of commands and for the command's help.
        epilog: examples and notes at the end of the command's help.
        arguments: arguments in the order of the command's help.
        run: function that runs the command and returns the exit code; ``None`` means success.
    """

    help: str
    epilog: str
    arguments: tuple[Argument, ...]
    run: Callable[[Namespace], int | None]


def command(help: str, epilog: str, *arguments: Argument) -> Callable[[Callable[[Namespace], int | None]], Command]:
    """Return a decorator that turns a function into a :class:`Command`; arguments are the attributes of :class:`Command`."""
    return lambda run: Command(help, epilog, arguments, run)


def option(
    name: str, help: str, metavar: str | None = None, kind: Callable[[str], Any] | None = None, **further: Any
) -> Argument:
    """Declare an argument with a value; ``kind`` is argparse's ``type``, ``further`` are more arguments of ``add_argument``."""

    def add(parser: Any) -> Any:
        action = parser.add_argument(name, help=help, metavar=metavar, type=kind, **further)
        if metavar in COMPLETED:
            action.complete = COMPLETED[metavar]
        return action

    return add


def repeated(name: str, dest: str, help: str, metavar: str | None = None, **further: Any) -> Argument:
    """Declare an option that may be given several times; its values are collected in a list."""
    return option(name, f"{help}; may be repeated", metavar, dest=dest, action="append", default=[], **further)


def flag(name: str, help: str) -> Argument:
    """Declare an option without a value."""
    return lambda parser: parser.add_argument(name, help=help, action="store_true")


def group(title: str, *arguments: Argument) -> Argument:
    """Declare a group of options that has a title in the command's help."""
    return lambda parser: _add_all(parser.add_argument_group(title), arguments)


def one_of(*arguments: Argument) -> Argument:
    """Declare mutually exclusive options."""
    return lambda parser: _add_all(parser.add_mutually_exclusive_group(), arguments)


def _add_all(parser: Any, arguments: Iterable[Argument]) -> None:
    for add in arguments:
        add(parser)


def folder_or_uri(text: str) -> Path | str:
    """Convert an argument to the path of a folder; a URI is returned as text."""
    return text if URI.match(text) else Path(text)


def readable(checkpoints: int | None) -> Callable[[str], Path | StoredCopy]:
    """Return an argparse ``type`` for a run's path or URI; :func:`trial_ray.cli.main` replaces a URI by a local copy's path.

    Args:
        checkpoints: number of newest checkpoints to copy from a URI, or ``None`` for all.
    """
    return lambda text: StoredCopy(text, checkpoints) if URI.match(text) else Path(text)


def positive(text: str) -> int:
    """Convert an argument to a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


# -- arguments that several commands have ------------------------------------------------------------------------------

FILE = option(
    "file", "experiment file, or the name of a tuned example, e.g. alfworld_quickstart", "FILE", experiment_file
)
VERBOSE = flag("--verbose", "show tracebacks and the messages of Ray's actors")
METHOD = option(
    "--method",
    f"another method: {', '.join(method_names())}, or your own FILE.py",
    "NAME",
    choices=Suggested(method_names()),
)
ITERATIONS = option("--iterations", "iterations in all (default: the file's)", "N", positive)
TRUST = flag(
    "--trust",
    "load the pickles of a folder that this user did not write on this machine: they can run any program "
    "(docs/reliability.md#security)",
)
SET = repeated("--set", "overrides", "replace one setting, e.g. --set env_config.max_turns=20", "KEY=VALUE")
LOG_TO = repeated(
    "--log-to",
    "log_to",
    "log to Weights & Biases, MLflow, Trackio or SwanLab too (docs/evaluation.md), or to Ray's metrics, for a cluster's Prometheus",
    choices=["wandb", "mlflow", "trackio", "swanlab", "ray"],
)
ENV_ADAPTER = repeated(
    "--env-adapter",
    "env_adapters",
    "Python file that defines ADAPTER, the adapter of your own environment",
    "FILE.py",
    kind=Path,
)
