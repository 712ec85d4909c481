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

from trial_envs.alfworld.difficulty import difficulty_named
from trial_envs.alfworld.engine import GameText
from trial_envs.alfworld.families import FAMILIES, parse_name
from trial_envs.alfworld.furnishing import furnish
from trial_envs.alfworld.game import Game
from trial_envs.alfworld.household import room_of
from trial_envs.alfworld.problem import write_problem
from trial_envs.alfworld.tasks import allowed_pairs, draw_task, word_task
from trial_envs.alfworld.walkthrough import solve
from trial_envs.errors import GeneratorSettingError, MissingEngineError, UnknownTaskError

_TRIAL = re.compile(r"gen-([a-z]+)-(\d+)-(\d+)")
_UNKNOWN_GOAL = "Your task is to: UNKNOWN GOAL."
"""The sentence that the shipped grammar leaves to be replaced."""


def task_ids(difficulty: str, seed: int, count: int, families: Sequence[str] | None = None) -> tuple[str, ...]:
    """The ids of the first ``count`` games of a seed; the families take turns.

    Args:
        difficulty: name of a level.
        seed: another seed gives other games.
        count: number of ids.
        families: kinds of tasks; default those of the level.

    Raises:
        GeneratorSettingError: no such level or family, or a negative seed or count.
    """
    level = difficulty_named(difficulty)
    if seed < 0 or count < 1:
        raise GeneratorSettingError(f"found seed {seed} and {count} games; expected at least seed 0 and 1 game")
    chosen = level.families if families is None else tuple(families)
    unknown = [family for family in chosen if family not in FAMILIES]
    if unknown or not chosen:
        raise GeneratorSettingError(f"found the families {list(chosen)}; expected some of {', '.join(FAMILIES)}")
    ids = []
    for index in range(count):
        family = chosen[index % len(chosen)]
        task = draw_task(level, family, random.Random(f"task {difficulty} {seed} {index} {family}"))
        ids.append(f"{task}/gen-{difficulty}-{seed}-{index}")
    return tuple(ids)


def generate(task_id: str) -> Game:
    """The game of an id.

    Raises:
        UnknownTaskError: the id is none of the generator's.
        GeneratorSettingError: the id names a level that does not exist.
    """
    name, _, trial = task_id.partition("/")
    task, found = parse_name(name), _TRIAL.fullmatch(trial)
    room = room_of(task.scene) if task else None
    if task is None or found is None or room is None:
        raise UnknownTaskError(
            f"{task_id!r:.200} is no generated game; "
            "expected <family>-<object>-None-<target>-<scene>/gen-<difficulty>-<seed>-<index>"
        )
    level = difficulty_named(found.group(1))
    if (task.object_type, task.target) not in allowed_pairs(task.family, room, level):
        raise UnknownTaskError(
            f"{task_id!r:.200} asks for something that no {room.name} of level {level.name!r} allows"
        )
    rng = random.Random(f"layout {task_id}")
    layout, finds = furnish(task, room, level, rng)
    domain, grammar = engine_texts()
    problem = write_problem(f"plan_{trial.replace('-', '_')}", task, layout)
    text = GameText(domain, problem, grammar.replace(_UNKNOWN_GOAL, word_task(task, rng)))
    return Game(task_id, task.family, text, solve(task, layout, finds))


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
