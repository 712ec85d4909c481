"""``trial-ray doctor``: what is installed, what the machine offers, what would stop a run, and the line that mends it."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from trial_ray.cli import console as terminal

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console
    from rich.table import Table

    from trial_ray.cli.checks import Check

EPILOG = """Nothing is changed, and nothing is asked of the network but the cluster that RAY_ADDRESS names. The exit code is 1 where
something will stop a run, and 0 where something is only missing that may not be needed.
"""


def add_parser(subparsers: Any, common: argparse.ArgumentParser) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "doctor",
        help="what is installed, what the machine offers, what would stop a run",
        description="Tell what is installed and what the machine offers; for what is wrong, the line that mends it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[common],
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print two tables, and what there is to mend."""
    from trial_ray.cli.checks import Level, machine_checks, package_checks

    console = terminal.output()
    packages, machine = list(package_checks()), list(machine_checks())
    console.print(package_table())
    console.print(machine_table(machine))
    wrong = [check for check in (*packages, *machine) if check.level is not Level.OK]
    print_findings(console, wrong)
    stops = sum(check.level is Level.STOPS for check in wrong)
    console.print(f"{stops} of these will stop a run" if stops else "nothing here stops a run", highlight=False)
    return terminal.FAILED if stops else terminal.DONE


def package_table() -> Table:
    """Installed and missing packages."""
    from rich.markup import escape
    from rich.table import Table

    from trial_ray.cli.checks import PACKAGES

    table = Table(title="packages", title_justify="left")
    table.add_column("package")
    table.add_column("needed for")
    table.add_column("install with", overflow="fold")
    for package in PACKAGES:
        found = package.installed()
        name = found or f"[red]missing[/] {' or '.join(package.names)}"
        table.add_row(name, escape(package.purpose), "" if found else escape(package.install()))
    return table


def machine_table(checks: Iterable[Check]) -> Table:
    """What was found on the machine, and the data of the environments."""
    from rich.markup import escape
    from rich.table import Table

    from trial_ray.cli.checks import Level, in_clone
    from trial_ray.cli.data import found_games, found_shop

    colours = {Level.OK: "green", Level.NOTE: "yellow", Level.STOPS: "red"}
    table = Table(title="machine", title_justify="left", show_header=False)
    where = "a clone" if in_clone() else "an installed package"
    table.add_row("Python", f"{sys.version.split()[0]} ({sys.executable}), trial-ray from {where}", "")
    for check in checks:
        table.add_row(check.name, escape(check.found), f"[{colours[check.level]}]{check.level.value}[/]")
    table.add_row("ALFWorld games", escape(found_games()), "")
    if importlib.util.find_spec("rapidfuzz"):
        table.add_row("WebShop", escape(found_shop()), "")
    return table


def print_findings(console: Console, checks: Iterable[Check]) -> None:
    """One line a finding, and one with what mends it, which can be copied."""
    for check in checks:
        console.print(
            f"{check.level.value}: {check.name}: {check.found}", markup=False, highlight=False, soft_wrap=True
        )
        terminal.show(f"    {check.mend}")
