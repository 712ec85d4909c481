"""``plan.json`` of a reproduction: its runs, how far each of them is, and how long what is left will take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trial_ray.experiments.cost import recorded_time
from trial_ray.experiments.run_folder import RunFolder
from trial_ray.files import write_json
from trial_ray.reproduction.plan import PlannedRun

PLAN_FILE = "plan.json"


def write_plan(folder: Path, name: str, runs: Sequence[PlannedRun]) -> Path:
    """Write how far runs are.

    Args:
        folder: of the reproduction.
        name: of the study.
        runs: its own, or those that a setting is chosen out of.

    Returns:
        The file. ``hours_left`` is what the iterations that are left take at the mean pace so far, if one run follows the other;
        ``None`` before the first iteration.
    """
    costs = {run.name: recorded_time(RunFolder(run.folder).cost) for run in runs}
    made = sum(iterations for iterations, _ in costs.values())
    hours = sum(seconds for _, seconds in costs.values()) / 3600
    left = sum(run.iterations - run.trained for run in runs)
    return write_json(
        folder / PLAN_FILE,
        {
            "study": name,
            "hours": hours,
            "iterations_left": left,
            "hours_left": left * hours / made if made else None,
            "runs": [
                {
                    "run": run.name,
                    "state": run.state(),
                    "trained": run.trained,
                    "iterations": run.iterations,
                    "seconds": costs[run.name][1],
                }
                for run in runs
            ],
        },
    )
