"""The command line's two consoles, error messages, exit codes, and what commands are declared with."""

from __future__ import annotations

import sys
from argparse import SUPPRESS, Action, ArgumentParser, ArgumentTypeError, Namespace
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
    from rich.table import Table

DONE, FAILED, USER_ERROR, INTERRUPTED = 0, 1, 2, 130

# -- what is shown -----------------------------------------------------------------------------------------------------


def output() -> Console:
    """The console of results and progress: rich's own, so that what any part of a command shows comes in one order."""
    import rich

    # Off a terminal rich assumes 80 columns, which cuts tables that go into a file or a log. A closed stdout is None.
    rich.reconfigure(width=None if sys.stdout is not None and sys.stdout.isatty() else 140)
    return rich.get_console()


def show(text: str) -> None:
    """Print plain text to standard output: what looks like markup, in a path, stays as it is."""
    import rich

    say(rich.get_console(), text)


def table(title: str, headers: Iterable[str], rows: Iterable[Iterable[object]], **options: Any) -> Table:
    """A table for :func:`output`.

    Args:
        title: above it.
        headers: of the columns; ``>`` in front justifies a column to the right.
        rows: their cells.
        options: of rich's ``Table``.
    """
    from rich.table import Table

    made = Table(title=title, title_justify="left", **options)
    for header in headers:
        made.add_column(header.lstrip(">"), justify="right" if header.startswith(">") else "left")
    for row in rows:
        made.add_row(*map(str, row))
    return made


def errors() -> Console:
    """Console of errors."""
    from rich.console import Console

    return Console(stderr=True, soft_wrap=True)


def report(error: Exception, verbose: bool) -> int:
    """Print an error and return its exit code."""
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


# -- how a command is declared -----------------------------------------------------------------------------------------

Argument = Callable[[Any], Any]
"""Adds an argument, or several, to a parser or to a group of one."""
COMPLETED = {
    **dict.fromkeys(("FILE", "FILE.py", "CHECKPOINT", "CHECKPOINT|oracle"), shtab.FILE),
    **dict.fromkeys(("DIR", "RUN", "PATH"), shtab.DIRECTORY),
}
"""What a shell completes, by metavar; choices are known to shtab."""


class Suggested(list[str]):
    """Choices that a shell completes; any other value is taken, too."""

    def __contains__(self, value: object) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand.

    Attributes:
        help: what it does, in the list of commands; the beginning of its own description.
        epilog: examples and notes.
        arguments: in the order in which its help lists them.
        run: does it; returns the exit code, or nothing where it is done.
    """

    help: str
    epilog: str
    arguments: tuple[Argument, ...]
    run: Callable[[Namespace], int | None]


def command(help: str, epilog: str, *arguments: Argument) -> Callable[[Callable[[Namespace], int | None]], Command]:
    """Decorate the function that runs a subcommand; arguments and attributes as those of :class:`Command`."""
    return lambda run: Command(help, epilog, arguments, run)


def option(
    name: str, help: str, metavar: str | None = None, kind: Callable[[str], Any] | None = None, **further: Any
) -> Argument:
    """An argument with a value; ``kind`` is its ``type``, ``further`` what else argparse takes."""

    def add(parser: Any) -> Any:
        action = parser.add_argument(name, help=help, metavar=metavar, type=kind, **further)
        if metavar in COMPLETED:
            action.complete = COMPLETED[metavar]
        return action

    return add


def renamed(name: str, argument: Argument) -> Argument:
    """An option that earlier versions called ``name``, which is taken once more, with a warning."""

    def add(parser: Any) -> None:
        new = argument(parser)
        parser.add_argument(
            name,
            action=_Renamed,
            dest=new.dest,
            type=new.type,
            const=new.option_strings[0],
            default=SUPPRESS,
            help=SUPPRESS,
        )

    return add


class _Renamed(Action):
    """Warns of an option's earlier name, and sets what the present one does, which ``const`` names."""

    def __call__(self, parser: ArgumentParser, args: Namespace, value: Any, name: str | None = None) -> None:
        """Warn and set."""
        show(f"warning: {name} is {self.const} now; the next version rejects the earlier name")
        setattr(args, self.dest, value)


def repeated(name: str, dest: str, help: str, metavar: str | None = None, **further: Any) -> Argument:
    """An option that may be given several times; its values are a list."""
    return option(name, f"{help}; may be repeated", metavar, dest=dest, action="append", default=[], **further)


def flag(name: str, help: str) -> Argument:
    """An option without a value."""
    return lambda parser: parser.add_argument(name, help=help, action="store_true")


def removed(name: str, instead: str) -> Argument:
    """An option that was removed in this version, and what to use in its place."""
    return lambda parser: parser.add_argument(name, action=_Removed, nargs="*", const=instead, help=SUPPRESS)


class _Removed(Action):
    """Ends the command with what to use in place of an option that there was once."""

    def __call__(self, parser: ArgumentParser, *args: Any) -> None:
        """Say it; the exit code is 2."""
        parser.error(f"{self.option_strings[0]} was removed: {self.const}")


def one_of(*arguments: Argument) -> Argument:
    """Options of which at most one may be given."""

    def add_all(parser: ArgumentParser) -> None:
        group = parser.add_mutually_exclusive_group()
        for add in arguments:
            add(group)

    return add_all


def place(text: str) -> Path | str:
    """An argparse type: the path of a folder, or a URI as text."""
    return text if URI.match(text) else Path(text)


def readable(checkpoints: int | None) -> Callable[[str], Path | StoredCopy]:
    """An argparse type: the path of a run, or a URI, in place of which the command gets the path of a copy.

    Args:
        checkpoints: how many of the newest are copied; ``None``: all.
    """
    return lambda text: StoredCopy(text, checkpoints) if URI.match(text) else Path(text)


def positive(text: str) -> int:
    """An argparse type: a whole number of at least 1."""
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
