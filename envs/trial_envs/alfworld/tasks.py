"""Tasks that a room allows at a difficulty level, and their instructions."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache

from trial_envs.alfworld.difficulty import Difficulty
from trial_envs.alfworld.families import CLEAN, COOL, HEAT, LOOK, PICK, PICK_TWO, TASK_PREFIX, TaskName
from trial_envs.alfworld.household import (
    CLEANABLE,
    CONTAINS,
    COOLABLE,
    FRIDGE,
    HEATABLE,
    MICROWAVE,
    OPENABLE,
    ROOMS,
    SINK,
    Room,
)

_SENTENCES = {
    PICK: ("put some {o} on {t}.", "put a {o} in {t}."),
    LOOK: ("look at {o} under the {t}.", "examine the {o} with the {t}."),
    CLEAN: ("put a clean {o} in {t}.", "clean some {o} and put it in {t}."),
    HEAT: ("put a hot {o} in {t}.", "heat some {o} and put it in {t}."),
    COOL: ("put a cool {o} in {t}.", "cool some {o} and put it in {t}."),
    PICK_TWO: ("put two {o} in {t}.", "find two {o} and put them in {t}."),
}


@dataclass(frozen=True)
class Treatment:
    """Cleaning, heating or cooling of the object before it is put into the target receptacle."""

    verb: str
    tool: str
    """Type of the receptacle used for the treatment."""
    kinds: frozenset[str]
    """Types of objects that can be treated."""


TREATMENTS = {
    CLEAN: Treatment("clean", SINK, CLEANABLE),
    HEAT: Treatment("heat", MICROWAVE, HEATABLE),
    COOL: Treatment("cool", FRIDGE, COOLABLE),
}


def draw_task(level: Difficulty, family: str, rng: random.Random) -> TaskName:
    """Draw a random task of a family: a room that allows such tasks, an object and a target."""
    room = rng.choice([room for room in ROOMS if allowed_pairs(family, room, level)])
    object_type, target = rng.choice(allowed_pairs(family, room, level))
    return TaskName(family, object_type, target, rng.choice(room.scenes))


def word_task(task: TaskName, rng: random.Random) -> str:
    """Return the task's instruction in one of the two wordings that ALFWorld has for each family."""
    sentence = rng.choice(_SENTENCES[task.family])
    return TASK_PREFIX + sentence.format(o=task.object_type.lower(), t=task.target.lower())


@lru_cache(maxsize=256)
def allowed_pairs(family: str, room: Room, level: Difficulty) -> tuple[tuple[str, str], ...]:
    """Return the pairs (object type, target type) that a task of this family can have in this room."""
    if family == LOOK:
        return tuple((o, room.lamp) for o in room.objects if room.lamp)
    treatment = TREATMENTS.get(family)
    if treatment and treatment.tool not in room.receptacles:
        return ()
    return tuple(
        (o, target)
        for o in room.objects
        for target in room.receptacles
        if o in CONTAINS[target]
        and (treatment is None or (o in treatment.kinds and target != treatment.tool))
        and (level.closed or target not in OPENABLE)
        and initial_receptacles(TaskName(family, o, target, 0), room, level)
    )


def initial_receptacles(task: TaskName, room: Room, level: Difficulty) -> list[str]:
    """Return the types of receptacles in the room in which the task's object may be at the start.

    The target's type is excluded. If the task includes a treatment (heating, cooling or cleaning), the receptacle used for it
    (microwave, fridge or sink) is excluded, too. Receptacles that must be opened are included only if ``level.closed`` is set.
    """
    treatment = TREATMENTS.get(task.family)
    avoided = (task.target, treatment.tool if treatment else None)
    return [
        kind
        for kind in room.receptacles
        if task.object_type in CONTAINS[kind] and kind not in avoided and (level.closed or kind not in OPENABLE)
    ]
