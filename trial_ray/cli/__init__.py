"""The ``trial-ray`` command line. This module has its entry point, :func:`main`; the other modules are:

- ``console``: output, error messages, exit codes, and the declaration of commands and options
- ``train``, ``evaluate``, ``sweep``, ``sft``, ``plan``, ``doctor``: the commands of these names; ``doctor`` also has ``data``
- ``paths``: the commands that read a run folder, ``report``, ``inspect``, ``export`` and ``replay``
"""

from __future__ import annotations

import argparse
import errno
import io
import logging
import os
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import shtab

from trial_ray import __version__
from trial_ray.cli import console, doctor, evaluate, paths, plan, sft, sweep, train
from trial_ray.errors import ConfigError, UserInputError
from trial_ray.runs.storage import StoredCopy
from trial_ray.termination import termination_as_interrupt

COMMANDS = {
    "train": train.train,
    "evaluate": evaluate.evaluate,
    "sweep": sweep.sweep,
    "report": paths.report,
    "inspect": paths.inspect,
    "replay": paths.replay,
    "sft": sft.sft,
    "export": paths.export,
    "data": doctor.data,
    "plan": plan.plan,
    "doctor": doctor.doctor,
}
_MANGLED = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)")
"""Matches a URI after a conversion to ``Path``, which removes one slash of ``//``."""
EPILOG = """start here:
  trial-ray doctor                                             installed and missing packages
  trial-ray train tuned_examples/alfworld_quickstart.py        a small agent on this machine
  trial-ray evaluate runs/NAME --split generated --tasks 64    its success on held-out tasks
  trial-ray COMMAND --help                                     options and examples of a command

exit codes: 0 done, 1 failed while running, 2 the input is wrong, 130 interrupted (state saved)
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="trial-ray",
        description="Train language-model agents in text environments with TRIAL and GRPO, on Ray RLlib.",
        epilog=EPILOG,
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=16),
    )
    parser.add_argument("--version", action="version", version=f"trial-ray {__version__}")
    shtab.add_argument_to(
        parser, help="print the completion script of a shell (docs/installation.md shows where to put it)"
    )
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        described = subparsers.add_parser(
            name,
            help=command.help,
            description=f"{command.help[0].upper()}{command.help[1:]}.",
            epilog=command.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for add in (console.VERBOSE, *command.arguments):
            add(described)
        described.set_defaults(run=command.run)
    return parser


def _local(value: Any) -> Any:
    """Expand ``~`` in an argument that is a path or a list of paths; replace a run at a URI by the path of a local copy.

    Raises:
        UserInputError: the user after ``~`` or the run does not exist, or the argument is a URI but must be a path.
    """
    if isinstance(value, list):
        return [_local(item) for item in value]
    if isinstance(value, StoredCopy):
        return value.fetch()
    if not isinstance(value, Path):
        return value
    if _MANGLED.match(str(value)) and not value.exists():
        raise UserInputError(
            f"{value} was a URI; expected a local path (docs/cluster.md lists the commands that take URIs)."
        )
    try:
        return value.expanduser()
    except RuntimeError as error:
        raise UserInputError(f"{value} is in the home of a user who is unknown here.") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: arguments of the command line, or ``None`` for those of the process.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Escape characters that the encoding of the terminal does not have.
            stream.reconfigure(errors="backslashreplace")
    args = build_parser().parse_args(argv)
    if not args.verbose:
        os.environ.setdefault("TQDM_DISABLE", "1")  # Hide the progress bars of transformers.
        # Hide the warning that RLlib logs whenever an algorithm is created.
        logging.getLogger("ray.rllib.algorithms").setLevel(logging.ERROR)
    try:
        for name, value in vars(args).items():
            setattr(args, name, _local(value))
        with termination_as_interrupt():
            return args.run(args) or console.DONE
    except KeyboardInterrupt:
        console.errors().print("interrupted")
        return console.INTERRUPTED
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            error = ConfigError(
                f"{str(error.filename)[:60]!r}... is too long for the name of a file; expected a path or a name."
            )
        return console.report(error, args.verbose)
