"""The command line's two consoles, error messages, exit codes, and what subcommands have in common."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trial_ray.algorithms.methods import method_names
from trial_ray.errors import TrialRayError, is_user_error, root_cause
from trial_ray.runs.experiment import experiment_file
from trial_ray.runs.storage import URI, StoredCopy
from trial_ray.runs.terminal import say

if TYPE_CHECKING:
    from rich.console import Console

DONE, FAILED, USER_ERROR, INTERRUPTED = 0, 1, 2, 130
REPEATED: dict[str, Any] = {"action": "append", "default": []}


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand.

    Attributes:
        help: what it does, in the list of commands; the beginning of its own description.
        epilog: examples and notes.
        add_arguments: declares its arguments.
        run: does it and returns the exit code.
    """

    help: str
    epilog: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


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


def errors() -> Console:
    """Console of errors."""
    from rich.console import Console

    return Console(stderr=True, soft_wrap=True)


def report(error: Exception, verbose: bool) -> int:
    """Print an error and return its exit code."""
    from rich.markup import escape

    from trial_ray.files import visible

    console = errors()
    if verbose:
        import traceback

        console.print("".join(traceback.format_exception(error)), markup=False, highlight=False)
    user = is_user_error(error)
    cause = root_cause(error)
    text = str(cause).strip() or type(cause).__name__
    known = user or isinstance(cause, TrialRayError)
    if not known:
        text = f"{type(cause).__name__}: {text.splitlines()[0]}"
    hint = "" if known or verbose else " (--verbose shows the traceback)"
    console.print(f"[bold red]{'error' if user else 'failed'}:[/] {escape(visible(text))}{hint}", highlight=False)
    for note in getattr(error, "__notes__", ()):
        console.print(visible(note), markup=False, highlight=False)
    return USER_ERROR if user else FAILED


def place(text: str) -> Path | str:
    """An argparse type: the path of a folder, or a URI as text."""
    return text if URI.match(text) else Path(text)


def readable(checkpoints: int | None, local: Callable[[str], Any] = Path) -> Callable[[str], Any]:
    """An argparse type: the path of a run, or a URI, in place of which the command gets the path of a copy.

    Args:
        checkpoints: how many of the newest are copied; ``None``: all.
        local: makes the path.
    """
    return lambda text: StoredCopy(text, checkpoints) if URI.match(text) else local(text)


def positive(text: str) -> int:
    """An argparse type: a whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1; found {text!r}")
    return value


OPTIONS: dict[str, dict[str, Any]] = {
    "file": {
        "type": experiment_file,
        "metavar": "FILE",
        "help": "experiment file, or the name of a tuned example, e.g. alfworld_quickstart",
    },
    "--verbose": {"action": "store_true", "help": "show tracebacks and the messages of Ray's actors"},
    "--method": {
        "metavar": "NAME",
        "help": f"another method: {', '.join(method_names())}, or a FILE.py of yours",
    },
    "--iterations": {"type": positive, "metavar": "N", "help": "iterations in all (default: the file's)"},
    "--trust": {
        "action": "store_true",
        "help": "load the pickles of a folder that this user did not write on this machine: they can run any program "
        "(docs/reliability.md#security)",
    },
    "--set": {
        **REPEATED,
        "dest": "overrides",
        "metavar": "KEY=VALUE",
        "help": "replace one setting, e.g. --set env_config.max_turns=20; may be repeated",
    },
    "--log-to": {
        **REPEATED,
        "choices": ["wandb", "mlflow", "trackio", "swanlab", "ray"],
        "help": "log to Weights & Biases, MLflow, Trackio or SwanLab too, or to Ray's metrics, for "
        "Prometheus; may be repeated (docs/evaluation.md)",
    },
    "--env-adapter": {
        **REPEATED,
        "dest": "env_adapters",
        "type": Path,
        "metavar": "FILE.py",
        "help": "what the trainer knows of an environment of yours: a file that defines ADAPTER; may be repeated",
    },
}
"""Arguments that several commands have."""


def add_options(parser: argparse.ArgumentParser, *names: str) -> None:
    """Declare some of :data:`OPTIONS`."""
    for name in names:
        parser.add_argument(name, **OPTIONS[name])


class _Removed(argparse.Action):
    """Ends the command with what to use in place of an option that there was once."""

    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> None:
        """Say it; the exit code is 2."""
        parser.error(f"{self.option_strings[0]} was removed: {self.const}")


def add_removed(parser: argparse.ArgumentParser, option: str, instead: str) -> None:
    """Declare an option that was removed in this version, and what to use in its place."""
    parser.add_argument(option, action=_Removed, nargs="*", const=instead, help=argparse.SUPPRESS)
