"""Games of our own, in all six families, for the engine's own domain and grammar.

A game is a pure function of its task id ``<family>-<object>-None-<target>-<scene>/gen-<difficulty>-<seed>-<index>``:
whoever knows the id has the game, so workers need no files, and a list of thousands of ids takes no time.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from trial_envs.alfworld.difficulty import Difficulty, difficulty_named
from trial_envs.alfworld.engine import GameText, entity_names
from trial_envs.alfworld.families import (
    CLEAN,
    COOL,
    FAMILIES,
    HEAT,
    LOOK,
    PICK,
    PICK_TWO,
    TASK_PREFIX,
    TaskName,
    parse_name,
)
from trial_envs.alfworld.game import Game
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
    room_of,
)
from trial_envs.alfworld.problem import Layout, write_problem
from trial_envs.errors import MissingEngineError, UnknownDifficultyError, UnknownTaskError

_TRIAL = re.compile(r"gen-([a-z]+)-(\d+)-(\d+)")

_SENTENCES = {
    PICK: ("put some {o} on {t}.", "put a {o} in {t}."),
    LOOK: ("look at {o} under the {t}.", "examine the {o} with the {t}."),
    CLEAN: ("put a clean {o} in {t}.", "clean some {o} and put it in {t}."),
    HEAT: ("put a hot {o} in {t}.", "heat some {o} and put it in {t}."),
    COOL: ("put a cool {o} in {t}.", "cool some {o} and put it in {t}."),
    PICK_TWO: ("put two {o} in {t}.", "find two {o} and put them in {t}."),
}
_TREATMENTS = {CLEAN: ("clean", SINK, CLEANABLE), HEAT: ("heat", MICROWAVE, HEATABLE), COOL: ("cool", FRIDGE, COOLABLE)}


def task_ids(difficulty: str, seed: int, count: int, families: Sequence[str] | None = None) -> tuple[str, ...]:
    """The ids of the first ``count`` games of a seed; the families take turns.

    Raises:
        UnknownDifficultyError: no such level, or no such family.
    """
    level = difficulty_named(difficulty)
    if seed < 0 or count < 1:
        raise UnknownDifficultyError(f"generator_seed is {seed} and num_games {count}; expected at least 0 and 1")
    chosen = tuple(families or level.families)
    unknown = [family for family in chosen if family not in FAMILIES]
    if unknown:
        raise UnknownDifficultyError(f"unknown families {unknown}; expected some of {', '.join(FAMILIES)}")
    return tuple(
        f"{_draw_task(level, chosen[index % len(chosen)], seed, index)}/gen-{difficulty}-{seed}-{index}"
        for index in range(count)
    )


def generate(task_id: str) -> Game:
    """The game of an id.

    Raises:
        UnknownTaskError: the id is none of the generator's.
    """
    name, _, trial = task_id.partition("/")
    task, found = parse_name(name), _TRIAL.fullmatch(trial)
    room = room_of(task.scene) if task else None
    if task is None or found is None or room is None:
        raise UnknownTaskError(
            f"{task_id!r} is no generated game; expected <family>-<object>-None-<target>-<scene>/gen-<difficulty>-<seed>-<n>"
        )
    level = difficulty_named(found.group(1))
    if not _possible(task, room, level):
        raise UnknownTaskError(f"{task_id!r} asks for something that no {room.name} of level {level.name!r} allows")
    rng = random.Random(f"layout {task_id}")
    layout, steps = _furnish(task, room, level, rng)
    sentence = TASK_PREFIX + rng.choice(_SENTENCES[task.family]).format(
        o=task.object_type.lower(), t=task.target.lower()
    )
    problem = write_problem(f"plan_{trial.replace('-', '_')}", task, layout)
    domain, grammar = engine_texts()
    text = GameText(domain, problem, grammar.replace("Your task is to: UNKNOWN GOAL.", sentence))
    return Game(task_id, task.family, text, _walkthrough(task, layout, steps))


@lru_cache(maxsize=1)
def engine_texts() -> tuple[str, str]:
    """The domain and the grammar that the ``alfworld`` package ships.

    They are read without importing the package, which would create a folder in the user's home.

    Raises:
        MissingEngineError: the package is not installed.
    """
    spec = find_spec("alfworld")
    if spec is None or not spec.submodule_search_locations:
        raise MissingEngineError("generated games need the package alfworld: pip install 'trial-ray[alfworld]'")
    folder = Path(spec.submodule_search_locations[0]) / "data"
    return (folder / "alfred.pddl").read_text(encoding="utf-8"), (folder / "alfred.twl2").read_text(encoding="utf-8")


def _draw_task(level: Difficulty, family: str, seed: int, index: int) -> TaskName:
    rng = random.Random(f"task {level.name} {seed} {index} {family}")
    rooms = [room for room in ROOMS if _pairs(family, room, level)]
    room = rng.choice(rooms)
    object_type, target = rng.choice(_pairs(family, room, level))
    return TaskName(family, object_type, target, rng.choice(room.scenes))


@lru_cache(maxsize=256)
def _pairs(family: str, room: Room, level: Difficulty) -> tuple[tuple[str, str], ...]:
    """The objects and targets that a task of this family can have in this room."""
    if family == LOOK:
        return tuple((o, room.lamp) for o in room.objects if room.lamp)
    tool, treatable = None, frozenset(room.objects)
    if family in _TREATMENTS:
        _, tool, treatable = _TREATMENTS[family]
        if tool not in room.receptacles:
            return ()
    return tuple(
        (o, target)
        for o in room.objects
        for target in room.receptacles
        if o in CONTAINS[target]
        and o in treatable
        and target not in (tool, "Sink")
        and (level.closed or target not in OPENABLE)
        and _sources(o, target, room, level, frozenset({tool}))
    )


def _sources(object_type: str, target: str, room: Room, level: Difficulty, avoided: frozenset[str | None]) -> list[str]:
    """Furniture in which the object may lie at first: not where it belongs, nor where it is treated."""
    return [
        r
        for r in room.receptacles
        if object_type in CONTAINS[r] and r != target and r not in avoided and (level.closed or r not in OPENABLE)
    ]


def _possible(task: TaskName, room: Room, level: Difficulty) -> bool:
    return (task.object_type, task.target) in _pairs(task.family, room, level)


def _furnish(task: TaskName, room: Room, level: Difficulty, rng: random.Random) -> tuple[Layout, list[str]]:
    """A room in which the task can be done; returns it with the ids of the objects to find."""
    layout = Layout()
    wanted = 2 if task.family == PICK_TWO else 1
    tool = _TREATMENTS[task.family][1] if task.family in _TREATMENTS else None
    source = rng.choice(_sources(task.object_type, task.target, room, level, frozenset({tool})))
    needed = [source] + ([tool] if tool else []) + ([task.target] if task.family != LOOK else [])
    kinds = needed + _further_furniture(needed, room, level, rng)
    for kind in rng.sample(kinds, len(kinds)):
        layout.add_receptacle(kind)
    finds = []
    for _ in range(wanted):
        spots = [
            r
            for r, k in layout.receptacles.items()
            if k in _sources(task.object_type, task.target, room, level, frozenset({tool}))
        ]
        finds.append(layout.add_object(task.object_type, rng.choice(spots)))
    if task.family == LOOK:
        tables = [r for r, kind in layout.receptacles.items() if kind not in OPENABLE]
        layout.add_object(task.target, rng.choice(tables))
    _scatter(task, room, level, layout, rng)
    return layout, finds


def _further_furniture(needed: list[str], room: Room, level: Difficulty, rng: random.Random) -> list[str]:
    missing = rng.randint(*level.receptacles) - len(needed)
    allowed = [r for r in room.receptacles if level.closed or r not in OPENABLE or r in needed]
    fresh = [r for r in allowed if r not in needed]
    chosen = rng.sample(fresh, min(missing, len(fresh)))
    while level.repeated and len(chosen) < missing:
        chosen.append(rng.choice([r for r in room.repeatable if r in allowed]))
    return chosen


def _scatter(task: TaskName, room: Room, level: Difficulty, layout: Layout, rng: random.Random) -> None:
    """Lays out objects that the task does not need."""
    kinds = [kind for kind in room.objects if level.lures or kind != task.object_type]
    for _ in range(rng.randint(*level.distractors)):
        kind = rng.choice(kinds)
        # A wanted object in its place from the start would make a task of one half solved, or solved outright.
        spots = [
            r
            for r, holder in layout.receptacles.items()
            if kind in CONTAINS[holder] and not (kind == task.object_type and holder == task.target)
        ]
        if spots:
            layout.add_object(kind, rng.choice(spots))


def _walkthrough(task: TaskName, layout: Layout, finds: list[str]) -> tuple[str, ...]:
    """Commands that win: each object is fetched, treated if need be, and brought to its place."""
    player = _Player(layout)
    for found in finds:
        player.take(found)
        if task.family in _TREATMENTS:
            verb, tool, _ = _TREATMENTS[task.family]
            player.use_on(verb, found, player.first_receptacle(tool))
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
