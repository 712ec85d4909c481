"""The solution of a generated game, by construction."""

from __future__ import annotations

from collections.abc import Sequence

from trial_envs.alfworld.engine import entity_names
from trial_envs.alfworld.families import LOOK, TaskName
from trial_envs.alfworld.household import OPENABLE
from trial_envs.alfworld.problem import Layout
from trial_envs.alfworld.tasks import TREATMENTS


def solve(task: TaskName, layout: Layout, finds: Sequence[str]) -> tuple[str, ...]:
    """Commands that win: each object is fetched, treated if need be, and brought to its place.

    Args:
        task: what is asked for.
        layout: the furnished room.
        finds: ids of the objects to use.
    """
    player = _Player(layout)
    for found in finds:
        player.take(found)
        if task.family in TREATMENTS:
            treatment = TREATMENTS[task.family]
            player.use_on(treatment.verb, found, player.first_receptacle(treatment.tool))
        if task.family == LOOK:
            player.switch_on(next(o for o, kind in layout.objects.items() if kind == task.target))
        else:
            player.put(found, player.first_receptacle(task.target))
    return tuple(player.commands)


class _Player:
    """Words the commands of somebody who knows where everything is."""

    def __init__(self, layout: Layout) -> None:
        entities = (*layout.receptacles, *layout.objects)
        self._names = entity_names(frozenset(("exists", entity.lower()) for entity in entities))
        self._layout = layout
        self._opened: set[str] = set()
        self._standing_at = ""
        self.commands: list[str] = []

    def first_receptacle(self, kind: str) -> str:
        return next(r for r, known in self._layout.receptacles.items() if known == kind)

    def take(self, thing: str) -> None:
        place = self._layout.places[thing]
        self._visit(place, enter=True)
        self.commands.append(f"take {self._name(thing)} from {self._name(place)}")

    def use_on(self, verb: str, thing: str, tool: str) -> None:
        self._visit(tool, enter=False)
        self.commands.append(f"{verb} {self._name(thing)} with {self._name(tool)}")

    def switch_on(self, lamp: str) -> None:
        self._visit(self._layout.places[lamp], enter=False)
        self.commands.append(f"use {self._name(lamp)}")

    def put(self, thing: str, place: str) -> None:
        self._visit(place, enter=True)
        self.commands.append(f"move {self._name(thing)} to {self._name(place)}")

    def _visit(self, receptacle: str, *, enter: bool) -> None:
        if self._standing_at != receptacle:
            self.commands.append(f"go to {self._name(receptacle)}")
        self._standing_at = receptacle
        if enter and self._layout.receptacles[receptacle] in OPENABLE and receptacle not in self._opened:
            self._opened.add(receptacle)
            self.commands.append(f"open {self._name(receptacle)}")

    def _name(self, entity: str) -> str:
        return self._names[entity.lower()]
