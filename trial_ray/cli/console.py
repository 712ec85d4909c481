"""The command line's two consoles, error messages and exit codes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trial_ray.errors import TrialRayError, is_user_error, root_cause
from trial_ray.runs.terminal import say

if TYPE_CHECKING:
    from rich.console import Console

DONE, FAILED, USER_ERROR, INTERRUPTED = 0, 1, 2, 130


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

    from trial_ray.reports.recorded import visible

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


OPTIONS: dict[str, dict[str, Any]] = {
    "--verbose": {"action": "store_true", "default": False, "help": "show tracebacks and the messages of Ray's actors"},
    "--set": {
        "dest": "overrides",
        "metavar": "KEY=VALUE",
        "help": "replace one setting, e.g. --set lr=1e-4 or --set env_config.split=train; may be repeated",
    },
    "--trust": {
        "action": "store_true",
        "default": False,
        "help": "load the pickles of a folder that this user did not write on this machine: they can run any program "
        "(docs/reliability.md#security)",
    },
    "--log-to": {
        "choices": ["wandb", "mlflow", "trackio", "swanlab"],
        "help": "log to Weights & Biases, MLflow, Trackio or SwanLab too, beside TensorBoard; may be repeated (docs/evaluation.md)",
    },
    "--env-adapter": {
        "dest": "env_adapters",
        "type": Path,
        "metavar": "FILE.py",
        "help": "what the trainer knows of an environment of yours: a file that defines ADAPTER; may be repeated",
    },
}
"""Those that several commands have; the ones without an action may be repeated."""


def add_options(parser: argparse.ArgumentParser, *names: str) -> None:
    """Declare some of :data:`OPTIONS`."""
    for name in names:
        parser.add_argument(name, **{"action": "append", "default": [], **OPTIONS[name]})


def positive(text: str) -> int:
    """An argparse type: a whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1; found {text!r}")
    return value
