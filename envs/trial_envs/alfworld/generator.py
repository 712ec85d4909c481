"""Generator of games of ALFWorld's six task families, with the PDDL domain and the text grammar of the ``alfworld`` package.

A game is a pure function of its task id ``<family>-<object>-None-<target>-<scene>/gen-<difficulty>-<seed>-<index>``, so
worker processes need no game files, and listing thousands of ids is fast.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from trial_envs.alfworld.difficulty import LEVELS
from trial_envs.alfworld.engine import GameText
from trial_envs.alfworld.families import FAMILIES, parse_name
from trial_envs.alfworld.furnishing import furnish
from trial_envs.alfworld.game import Game
from trial_envs.alfworld.household import room_of
from trial_envs.alfworld.problem import write_problem
from trial_envs.alfworld.tasks import allowed_pairs, draw_task, word_task
from trial_envs.alfworld.walkthrough import solve
from trial_envs.core.extras import install_command
from trial_envs.core.levels import level_named, require_whole
from trial_envs.errors import GeneratorSettingError, MissingEngineError, UnknownTaskError

_TRIAL = re.compile(r"gen-([a-z]+)-(0|[1-9][0-9]*)-(0|[1-9][0-9]*)")
_UNKNOWN_GOAL = "Your task is to: UNKNOWN GOAL."
"""Placeholder for the task's instruction in the grammar of the ``alfworld`` package."""


def task_ids(difficulty: str, seed: int, count: int, families: Sequence[str] | None = None) -> tuple[str, ...]:
    """Return the ids of the first ``count`` games of a seed; the families alternate.

    Args:
        difficulty: name of a difficulty level.
        seed: seed of the generator, at least 0.
        count: number of ids, at least 1.
        families: families of tasks; default: the level's families.

    Raises:
        GeneratorSettingError: the level or a family is unknown, the seed is negative, or the count is below 1.
    """
    level = level_named(LEVELS, difficulty)
    require_whole(0, seed=seed)
    require_whole(1, count=count)
    chosen = level.families if families is None else tuple(families)
    unknown = [family for family in chosen if family not in FAMILIES]
    if unknown or not chosen:
        raise GeneratorSettingError(f"Expected families of {', '.join(FAMILIES)}, got {list(chosen)}.")
    ids = []
    for index in range(count):
        family = chosen[index % len(chosen)]
        task = draw_task(level, family, random.Random(f"task {difficulty} {seed} {index} {family}"))
        ids.append(f"{task}/gen-{difficulty}-{seed}-{index}")
    return tuple(ids)


def generate(task_id: str) -> Game:
    """Generate the game of a task id.

    Raises:
        UnknownTaskError: the generator has no game with this id.
        GeneratorSettingError: the id has an unknown level.
    """
    name, _, trial = task_id.partition("/")
    task, match = parse_name(name), _TRIAL.fullmatch(trial)
    room = room_of(task.scene) if task else None
    if task is None or match is None or room is None:
        raise UnknownTaskError(
            f"Unknown generated game {task_id!r:.200}; "
            "expected <family>-<object>-None-<target>-<scene>/gen-<difficulty>-<seed>-<index>."
        )
    level = level_named(LEVELS, match.group(1))
    if (task.object_type, task.target) not in allowed_pairs(task.family, room, level):
        raise UnknownTaskError(
            f"Unknown generated game {task_id!r:.200}; no {room.name} of level {level.name!r} allows this object and target."
        )
    rng = random.Random(f"layout {task_id}")
    layout, targets = furnish(task, room, level, rng)
    domain, grammar = engine_texts()
    problem = write_problem(f"plan_{trial.replace('-', '_')}", task, layout)
    text = GameText(domain, problem, grammar.replace(_UNKNOWN_GOAL, word_task(task, rng)))
    return Game(task_id, task.family, text, solve(task, layout, targets))


@lru_cache(maxsize=1)
def engine_texts() -> tuple[str, str]:
    """Return the PDDL domain and the text grammar that the ``alfworld`` package ships.

    Both are read without importing the package, because the import creates a folder in the user's home.

    Raises:
        MissingEngineError: the package is not installed.
    """
    spec = find_spec("alfworld")
    if spec is None or not spec.submodule_search_locations:
        raise MissingEngineError(f"The package alfworld is not installed: {install_command('alfworld')}")
    folder = Path(spec.submodule_search_locations[0]) / "data"
    return (folder / "alfred.pddl").read_text(encoding="utf-8"), (folder / "alfred.twl2").read_text(encoding="utf-8")
