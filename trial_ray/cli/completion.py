"""``trial-ray --print-completion SHELL``: the script with which a shell completes commands, options, files and names."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

SHELLS = ("bash", "zsh", "fish")
FILES, FOLDERS = ("FILE", "FILE.py", "CHECKPOINT", "CHECKPOINT|oracle"), ("DIR", "RUN", "PATH")


def add_option(parser: argparse.ArgumentParser) -> None:
    """Declare the option on the parser of the whole command line."""
    parser.add_argument(
        "--print-completion",
        action=PrintCompletion,
        choices=SHELLS,
        help="print the completion script of a shell (docs/installation.md says where to put it)",
    )


class PrintCompletion(argparse.Action):
    """Prints the script and ends the command."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Called by argparse as soon as it reads the option."""
        import shtab

        _mark(parser)
        print(shtab.complete(parser, shell=str(values)))
        parser.exit()


def _mark(parser: argparse.ArgumentParser) -> None:
    """Say of every argument what completes it: shtab knows choices, but not that a metavar means a path."""
    import shtab

    from trial_ray.algorithms.methods import method_names

    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _mark(command)
        elif action.metavar in FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.metavar in FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif "--method" in action.option_strings:
            action.choices = method_names()
