"""How large and how hidden a generated game is."""

from __future__ import annotations

from dataclasses import dataclass

from trial_envs.alfworld.families import CLEAN, FAMILIES, LOOK, PICK
from trial_envs.errors import GeneratorSettingError


@dataclass(frozen=True)
class Difficulty:
    """A level of the generator."""

    name: str
    receptacles: tuple[int, int]
    """Least and most pieces of furniture in the room, those that the task needs included."""
    distractors: tuple[int, int]
    """Least and most objects that the task does not need."""
    families: tuple[str, ...]
    """Kinds of tasks that are drawn."""
    closed: bool
    """Whether the object may lie in, or belong into, something that must be opened first."""
    repeated: bool
    """Whether a room may have several drawers, cabinets, shelves, …"""
    lures: bool
    """Whether more objects of the wanted type may lie about."""


LEVELS = {
    level.name: level
    for level in (
        Difficulty("tiny", (4, 5), (2, 3), (PICK, LOOK), closed=False, repeated=False, lures=False),
        Difficulty("small", (5, 7), (3, 5), (PICK, LOOK, CLEAN), closed=True, repeated=False, lures=False),
        Difficulty("medium", (9, 12), (9, 12), FAMILIES, closed=True, repeated=True, lures=True),
        Difficulty("official", (9, 35), (22, 52), FAMILIES, closed=True, repeated=True, lures=True),
    )
}


def difficulty_named(name: str) -> Difficulty:
    """The level of a name.

    Raises:
        GeneratorSettingError: there is none.
    """
    try:
        return LEVELS[name]
    except KeyError:
        raise GeneratorSettingError(f"unknown difficulty {name!r}; expected one of {', '.join(LEVELS)}") from None
