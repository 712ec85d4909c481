"""Furnishes a room so that a task can be solved in it."""

from __future__ import annotations

import random

from trial_envs.alfworld.difficulty import Difficulty
from trial_envs.alfworld.families import LOOK, PICK_TWO, TaskName
from trial_envs.alfworld.household import CONTAINS, OPENABLE, Room
from trial_envs.alfworld.problem import Layout
from trial_envs.alfworld.tasks import TREATMENTS, initial_receptacles


def furnish(task: TaskName, room: Room, level: Difficulty, rng: random.Random) -> tuple[Layout, list[str]]:
    """Furnish a room so that the task can be solved.

    Returns:
        The layout, and the ids of the task's objects, which :func:`trial_envs.alfworld.walkthrough.solve` needs.
    """
    layout = Layout()
    initial = initial_receptacles(task, room, level)
    needed = _needed_furniture(task, rng.choice(initial))
    kinds = needed + _further_furniture(needed, room, level, rng)
    for kind in rng.sample(kinds, len(kinds)):
        layout.add_receptacle(kind)
    allowed = [receptacle for receptacle, kind in layout.receptacles.items() if kind in initial]
    count = 2 if task.family == PICK_TWO else 1
    targets = [layout.add_object(task.object_type, rng.choice(allowed)) for _ in range(count)]
    if task.family == LOOK:
        open_furniture = [r for r, kind in layout.receptacles.items() if kind not in OPENABLE]
        layout.add_object(task.target, rng.choice(open_furniture))
    _scatter(task, room, level, layout, rng)
    return layout, targets


def _needed_furniture(task: TaskName, source: str) -> list[str]:
    needed = [source]
    if task.family in TREATMENTS:
        needed.append(TREATMENTS[task.family].tool)
    if task.family != LOOK:
        needed.append(task.target)
    if task.family == LOOK and source in OPENABLE:
        needed.append("SideTable")  # The task's lamp is put only on furniture that cannot be opened.
    return needed


def _further_furniture(needed: list[str], room: Room, level: Difficulty, rng: random.Random) -> list[str]:
    missing = rng.randint(*level.receptacles) - len(needed)
    allowed = [kind for kind in room.receptacles if level.closed or kind not in OPENABLE]
    fresh = [kind for kind in allowed if kind not in needed]
    chosen = rng.sample(fresh, max(0, min(missing, len(fresh))))
    while level.repeated and len(chosen) < missing:
        chosen.append(rng.choice(room.repeatable))
    return chosen


def _scatter(task: TaskName, room: Room, level: Difficulty, layout: Layout, rng: random.Random) -> None:
    """Put distractors, objects that the task does not need, into random receptacles."""
    kinds = [kind for kind in room.objects if level.same_type_distractors or kind != task.object_type]
    for _ in range(rng.randint(*level.distractors)):
        kind = rng.choice(kinds)
        # An object of the task's type must not start in the task's target, where it could already count as put there.
        allowed = [
            receptacle
            for receptacle, holder in layout.receptacles.items()
            if kind in CONTAINS[holder] and not (kind == task.object_type and holder == task.target)
        ]
        if allowed:
            layout.add_object(kind, rng.choice(allowed))
