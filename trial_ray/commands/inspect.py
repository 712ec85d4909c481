"""``trial-ray inspect RUN``: the trajectories that a run recorded, and the turns of one of them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trial_ray.commands import console as terminal
from trial_ray.errors import UserInputError

if TYPE_CHECKING:
    from rich.table import Table

    from trial_ray.rollout.trajectory import Trajectory

SHOWN_CHARACTERS = 300
EPILOG = """examples:
  trial-ray inspect runs/my-run                              trajectories of the newest iteration
  trial-ray inspect runs/my-run --iteration 3
  trial-ray inspect runs/my-run --iteration 3 --show 7       turns of its trajectory number 7

The files are Parquet (RUN/trajectories/iteration=...), which pandas, DuckDB and pyarrow read as well.
"""


def add_parser(subparsers: Any, common: argparse.ArgumentParser) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "inspect",
        help="look at the trajectories of a run",
        description="List the trajectories that a run recorded in one iteration, or show the turns of one of them.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[common],
    )
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="run folder")
    parser.add_argument(
        "--iteration", type=terminal.positive, metavar="N", help="which iteration (default: the newest)"
    )
    parser.add_argument("--show", type=terminal.positive, metavar="K", help="show the turns of trajectory number K")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print one table."""
    from trial_ray.experiments.run_folder import RunFolder
    from trial_ray.rollout.recording import read_trajectories

    folder = RunFolder.reopen(args.run_folder)
    recorded = folder.recorded_iterations()
    if not recorded:
        raise UserInputError(f"{folder.path} has recorded no trajectories yet.")
    iteration = args.iteration or recorded[-1]
    if iteration not in recorded:
        raise UserInputError(
            f"{folder.path} recorded no iteration {iteration}; it has {recorded[0]} to {recorded[-1]}."
        )
    trajectories = read_trajectories(folder.trajectories, iteration)
    console = terminal.output()
    if args.show is None:
        console.print(trajectory_table(trajectories, f"iteration {iteration}"))
    elif args.show > len(trajectories):
        raise UserInputError(f"Iteration {iteration} has {len(trajectories)} trajectories; found --show {args.show}.")
    else:
        console.print(turn_table(trajectories[args.show - 1]))
    return terminal.DONE


def trajectory_table(trajectories: list[Trajectory], title: str) -> Table:
    """One row a trajectory."""
    from rich.table import Table

    won = sum(trajectory.success for trajectory in trajectories)
    table = Table(title=f"{title}: {len(trajectories)} trajectories, {won} successful")
    for header in ("#", "task", "family", "turns", "return", "success", "ended"):
        table.add_column(header, justify="right" if header in ("#", "turns", "return") else "left")
    for number, trajectory in enumerate(trajectories, start=1):
        table.add_row(
            str(number),
            readable(trajectory.task_id),
            readable(trajectory.family),
            str(len(trajectory.turns)),
            f"{trajectory.episode_return:g}",
            "yes" if trajectory.success else "",
            readable(trajectory.error or trajectory.ended),
        )
    return table


def turn_table(trajectory: Trajectory) -> Table:
    """One row a turn."""
    from rich.table import Table

    table = Table(title=readable(trajectory.task_id), show_lines=True)
    table.add_column("turn", justify="right")
    for header in ("observation", "action", "outcome"):
        table.add_column(header, overflow="fold")
    for header in ("reward", "prompt + response tokens"):
        table.add_column(header, justify="right")
    for number, turn in enumerate(trajectory.turns, start=1):
        table.add_row(
            str(number),
            readable(turn.observation),
            readable(turn.action if turn.valid else f"{turn.action} (invalid form)"),
            readable(turn.outcome),
            f"{turn.reward:g}",
            f"{len(turn.prompt_ids)} + {len(turn.response_ids)}",
        )
    return table


def readable(text: str) -> Any:
    """Recorded text for the terminal: cut, and never taken as markup or as control sequences of the terminal."""
    from rich.text import Text

    cut = text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + " …"
    return Text("".join(char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in cut))
