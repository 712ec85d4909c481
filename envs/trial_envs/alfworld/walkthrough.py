"""The solution of a generated game, derived from its layout."""

from __future__ import annotations

from collections.abc import Sequence

from trial_envs.alfworld.engine import entity_names
from trial_envs.alfworld.families import LOOK, TaskName
from trial_envs.alfworld.household import OPENABLE
from trial_envs.alfworld.problem import Layout
from trial_envs.alfworld.tasks import TREATMENTS


def solve(task: TaskName, layout: Layout, targets: Sequence[str]) -> tuple[str, ...]:
    """Return commands that win the game.

    The commands take each of the task's objects, clean, heat or cool it if required, and put it into the target receptacle; in
    the family :data:`LOOK`, they switch on the lamp instead.

    Args:
        task: the task.
        layout: the furnished room.
        targets: ids of the task's objects.
    """
    commands = _CommandWriter(layout)
    for target in targets:
        commands.take(target)
        if task.family in TREATMENTS:
            treatment = TREATMENTS[task.family]
            commands.use_on(treatment.verb, target, commands.first_receptacle(treatment.tool))
        if task.family == LOOK:
            commands.switch_on(next(o for o, kind in layout.objects.items() if kind == task.target))
        else:
            commands.put(target, commands.first_receptacle(task.target))
    return tuple(commands.written)


class _CommandWriter:
    """Writes commands for a game with a known layout, and the commands ``go to`` and ``open`` that must precede them."""

    def __init__(self, layout: Layout) -> None:
        entities = (*layout.receptacles, *layout.objects)
        self._names = entity_names(frozenset(("exists", entity.lower()) for entity in entities))
        self._layout = layout
        self._opened: set[str] = set()
        self._current = ""
        self.written: list[str] = []

    def first_receptacle(self, kind: str) -> str:
        return next(r for r, known in self._layout.receptacles.items() if known == kind)

    def take(self, item: str) -> None:
        receptacle = self._layout.receptacle_of[item]
        self._visit(receptacle, enter=True)
        self.written.append(f"take {self._name(item)} from {self._name(receptacle)}")

    def use_on(self, verb: str, item: str, tool: str) -> None:
        self._visit(tool, enter=False)
        self.written.append(f"{verb} {self._name(item)} with {self._name(tool)}")

    def switch_on(self, lamp: str) -> None:
        self._visit(self._layout.receptacle_of[lamp], enter=False)
        self.written.append(f"use {self._name(lamp)}")

    def put(self, item: str, receptacle: str) -> None:
        self._visit(receptacle, enter=True)
        self.written.append(f"move {self._name(item)} to {self._name(receptacle)}")

    def _visit(self, receptacle: str, *, enter: bool) -> None:
        if self._current != receptacle:
            self.written.append(f"go to {self._name(receptacle)}")
        self._current = receptacle
        if enter and self._layout.receptacles[receptacle] in OPENABLE and receptacle not in self._opened:
            self._opened.add(receptacle)
            self.written.append(f"open {self._name(receptacle)}")

    def _name(self, entity: str) -> str:
        return self._names[entity.lower()]
