"""Recorded trajectories in formats of other tools."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from trial_ray.errors import UserInputError
from trial_ray.files import require_new_folder, write_folder
from trial_ray.reports.atif import write_atif
from trial_ray.reports.dataset import write_dataset
from trial_ray.reports.recorded import RecordedTrajectory
from trial_ray.reports.records import RunRecord

Write = Callable[[RunRecord, Iterable[Sequence[RecordedTrajectory]], Path], int]
EXPORTS: dict[str, Write] = {"atif": write_atif, "datasets": write_dataset}
"""What writes each format into a folder that it makes, and returns the number of trajectories."""


def export_trajectories(run: RunRecord, format_name: str, folder: Path, notes: list[str]) -> int:
    """Write the run's trajectories into a new folder, which appears complete or not at all.

    Args:
        run: whose trajectories.
        format_name: a key of :data:`EXPORTS`.
        folder: must be new or empty.
        notes: takes a sentence for each iteration that cannot be read.

    Returns:
        How many trajectories were written.

    Raises:
        UserInputError: the folder holds something, or no trajectory could be read.
    """
    require_new_folder(folder)
    counted: list[int] = []

    def write(partial: Path) -> None:
        counted.append(EXPORTS[format_name](run, _readable(run, notes), partial))
        if not counted[-1]:
            raise UserInputError(" ".join(notes) or "There are no trajectories with a turn to export.")

    write_folder(folder, write)
    return counted[-1]


def _readable(run: RunRecord, notes: list[str]) -> Iterator[list[RecordedTrajectory]]:
    for iteration in run.recorded:
        try:
            yield run.read(iteration)
        except UserInputError as error:
            notes.append(f"{run.name}: iteration {iteration} is not exported. {error}")
