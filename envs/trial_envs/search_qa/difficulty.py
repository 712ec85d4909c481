"""Difficulty levels of the generated worlds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Difficulty:
    """One difficulty level."""

    name: str
    passages: int
    """Number of passages of a world by default."""
    min_passages: int
    max_passages: int
    results: int
    """Number of passages that a search returns by default."""
    concise: bool
    """True if names are single words in lower case from a fixed list, years have two digits, a passage has no sentence beyond the
    facts of its title, and the names that an episode has shown are listed as actions."""


LEVELS = {
    level.name: level
    for level in (
        Difficulty("tiny", 24, 16, 160, 1, concise=True),
        Difficulty("official", 10_000, 40, 2_000_000, 3, concise=False),
    )
}
