"""Recorded trajectories in the terminal: a table of them, and the text of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from trial_ray.files import visible
from trial_ray.reports.templates import render
from trial_ray.runs.recorded_trajectory import RecordedTrajectory, TokenTexts

MAX_CELL_LENGTH = 100


def list_trajectories(recorded: Sequence[RecordedTrajectory], title: str) -> Table:
    """Return a table with one row per trajectory."""
    successful = sum(trajectory.trajectory.success for trajectory in recorded)
    table = Table(title=f"{title}: {len(recorded)} trajectories, {successful} successful")
    for name in ("#", "task", "family", "turns", "return", "success", "ended", "advantage", "disagreement"):
        table.add_column(name, overflow="fold")
    for row in recorded:
        trajectory = row.trajectory
        cells = (
            str(row.number),
            trajectory.task_id,
            trajectory.family,
            str(len(trajectory.turns)),
            f"{trajectory.episode_return:g}",
            "yes" if trajectory.success else "",
            trajectory.error or trajectory.ended,
            "" if row.advantage is None else f"{row.advantage:.2f}",
            "" if row.disagreement is None else f"{row.disagreement:.4f}",
        )
        table.add_row(*(Text(visible(cell).replace("\n", " ")[:MAX_CELL_LENGTH]) for cell in cells))
    return table


def print_trajectory(recorded: RecordedTrajectory, tokens: TokenTexts | None) -> Iterator[Text]:
    """Yield one trajectory as text: prompt, response and recorded values of every turn.

    Args:
        recorded: the trajectory.
        tokens: texts of the run's tokens; ``None``: prompts and responses are omitted.
    """
    yield Text(render("trajectory.txt.jinja", recorded=recorded, tokens=tokens, visible=visible))
