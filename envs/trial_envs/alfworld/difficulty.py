"""Difficulty levels of the generated games."""

from __future__ import annotations

from dataclasses import dataclass

from trial_envs.alfworld.families import CLEAN, FAMILIES, LOOK, PICK


@dataclass(frozen=True)
class Difficulty:
    """One difficulty level."""

    name: str
    receptacles: tuple[int, int]
    """Minimum and maximum number of receptacles in the room, including the task's receptacles."""
    distractors: tuple[int, int]
    """Minimum and maximum number of distractors, objects that the task does not need. A distractor that cannot be
    put into any receptacle of the room is omitted, so there may be fewer than the minimum."""
    families: tuple[str, ...]
    """Families of tasks that are drawn by default."""
    closed: bool
    """True if receptacles that the agent must open are allowed: as the place of the task's object, as the task's target, and
    as furniture that the task does not need."""
    repeated: bool
    """True if a room may have several receptacles of one kind."""
    same_type_distractors: bool
    """True if distractors may have the type of the task's object."""


LEVELS = {
    level.name: level
    for level in (
        Difficulty("tiny", (4, 5), (2, 3), (PICK, LOOK), closed=False, repeated=False, same_type_distractors=False),
        Difficulty(
            "small", (5, 7), (3, 5), (PICK, LOOK, CLEAN), closed=True, repeated=False, same_type_distractors=False
        ),
        Difficulty("medium", (9, 12), (9, 12), FAMILIES, closed=True, repeated=True, same_type_distractors=True),
        Difficulty("official", (9, 35), (22, 52), FAMILIES, closed=True, repeated=True, same_type_distractors=True),
    )
}
