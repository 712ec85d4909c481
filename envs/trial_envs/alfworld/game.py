"""One ALFWorld game, official or generated."""

from __future__ import annotations

from dataclasses import dataclass

from trial_envs.alfworld.engine import GameText


@dataclass(frozen=True)
class Game:
    """A game that the engine can load."""

    task_id: str
    """``<name>/<trial>``, as in the official directory tree."""
    family: str
    text: GameText
    walkthrough: tuple[str, ...]
    """Commands that win the game; empty if the file of an official game has none."""
