"""Writes generated games to disk in the layout of ALFWorld's official games."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from trial_envs.alfworld.engine import AlfredEngine
from trial_envs.alfworld.families import LOOK, parse_name
from trial_envs.alfworld.game import Game
from trial_envs.alfworld.generator import generate, task_ids
from trial_envs.errors import CorruptGameError, TrialEnvError


def write_games(
    folder: str | os.PathLike[str],
    n: int,
    seed: int,
    difficulty: str,
    *,
    split: str = "train",
    families: Sequence[str] | None = None,
) -> list[str]:
    """Write ``n`` games as ``<folder>/json_2.1.1/<split>/<name>/<trial>/{game.tw-pddl,traj_data.json}``.

    Before a game is written, its walkthrough is replayed to check that it wins. The files are written to a temporary folder next to
    ``folder``, which is renamed at the end, so nothing is left after an error.

    Args:
        folder: folder to create; it may exist if it is empty.
        n: number of games.
        seed: seed of the generator.
        difficulty: name of a difficulty level.
        split: name of the split folder; :class:`ALFWorldEnv` plays the games with ``data=folder, split=split``.
        families: families of tasks; default: the level's families.

    Returns:
        The task ids of the games.

    Raises:
        FileExistsError: the folder is not empty.
        GeneratorSettingError: the level or a family is unknown, or a number is out of range.
    """
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} is not empty; choose a folder that is new or empty.")
    ids = task_ids(difficulty, seed, n, families)
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    try:
        _write_all(work / "json_2.1.1" / split, ids)
        work.chmod(0o755)
        os.replace(work, target)
    except BaseException:
        shutil.rmtree(work)
        raise
    return list(ids)


def _write_all(folder: Path, ids: Sequence[str]) -> None:
    engine = AlfredEngine()
    try:
        for task_id in ids:
            game = generate(task_id)
            check_solution(engine, game)
            game_folder = folder / task_id
            game_folder.mkdir(parents=True)
            (game_folder / "game.tw-pddl").write_text(_published_form(game), encoding="utf-8")
            (game_folder / "traj_data.json").write_text(_trajectory_data(task_id), encoding="utf-8")
    finally:
        engine.close()


def check_solution(engine: AlfredEngine, game: Game) -> None:
    """Check that a game's walkthrough wins the game, by replaying it.

    Raises:
        CorruptGameError: a command is not admissible, or the game is not won by exactly the last command.
    """
    engine.load(game.text)
    state = engine.reset()
    for command in game.walkthrough:
        if state.won:
            raise CorruptGameError(f"{game.task_id} is won before its walkthrough ends.")
        state = engine.step(command)
        if not state.understood:
            raise CorruptGameError(f"{game.task_id}: the walkthrough's {command!r} is not admissible.")
    if not state.won:
        raise CorruptGameError(f"{game.task_id} is not won by its walkthrough.")


def _published_form(game: Game) -> str:
    text = game.text
    content = {"pddl_domain": text.domain, "grammar": text.grammar, "pddl_problem": text.problem}
    return json.dumps(content | {"solvable": True, "walkthrough": list(game.walkthrough)})


def _trajectory_data(task_id: str) -> str:
    """Return the content of the file ``traj_data.json`` that ALFWorld's own environment reads."""
    name, trial = task_id.split("/")
    task = parse_name(name)
    if task is None:
        raise TrialEnvError(f"{task_id!r} is not a task of the six families.")
    look = task.family == LOOK
    parameters = {
        "object_target": task.object_type,
        "object_sliced": False,
        "mrecep_target": "",
        "parent_target": "" if look else task.target,
        "toggle_target": task.target if look else "",
    }
    scene = {"scene_num": task.scene, "floor_plan": f"FloorPlan{task.scene}"}
    return json.dumps({"task_id": trial, "task_type": task.family, "scene": scene, "pddl_params": parameters})
