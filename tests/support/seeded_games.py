"""Checks of every environment of another library that is made from seeds, for ``tests/peers``."""

from __future__ import annotations

import copy
import os
import pickle
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

import trial_envs  # noqa: F401  registers the ids

KEYS = {"task", "task_id", "family", "admissible_actions", "won", "score", "invalid_action"}


def make(env_id: str, settings: dict[str, Any]) -> gymnasium.Env[str, str]:
    """Return an instance without Gymnasium's own checks."""
    return gymnasium.make(env_id, disable_env_checker=True, **settings)


def play(env_id: str, settings: dict[str, Any], task: str, actions: Sequence[str]) -> list[Any]:
    """Return all answers of a new instance to the actions, until the episode ends."""
    env = make(env_id, settings)
    answers: list[Any] = [env.reset(options={"task": task})]
    for action in actions:
        answers.append(env.step(action))
        assert set(answers[-1][-1]) == KEYS
        if answers[-1][2] or answers[-1][3]:
            break
    env.close()
    return answers


def play_in_turn(
    env_id: str, settings: dict[str, Any], tasks: Sequence[str], actions: Sequence[str]
) -> list[list[Any]]:
    """Return the answers of instances that are played in turn, while the process itself draws random numbers."""
    envs = [make(env_id, settings) for _ in tasks]
    answers: list[list[Any]] = [[env.reset(options={"task": task})] for env, task in zip(envs, tasks, strict=True)]
    over = [False] * len(envs)
    for action in actions:
        for index, env in enumerate(envs):
            random.random(), np.random.rand()
            if not over[index]:
                answers[index].append(env.step(action))
                over[index] = answers[index][-1][2] or answers[index][-1][3]
    for env in envs:
        env.close()
    return answers


def check_seeded(env_id: str, settings: dict[str, Any], tasks: Sequence[str], actions: Sequence[str]) -> None:
    """Check that tasks are pure functions of their ids: alone, in turn, copied, and pickled in the middle of an episode."""
    random.seed(5), np.random.seed(5)
    expected = [random.random(), float(np.random.rand())]
    random.seed(5), np.random.seed(5)
    alone = [play(env_id, settings, task, actions) for task in tasks]
    assert [random.random(), float(np.random.rand())] == expected, "the process's own random numbers changed"
    assert play_in_turn(env_id, settings, tasks, actions) == alone
    _check_copies(env_id, settings, tasks[0], actions, alone[0])


def check_games(env_id: str, setting: str, games: Mapping[str, list[str]]) -> None:
    """Check that games are pure functions of their task ids, in this process and in another one.

    Args:
        env_id: id of the environment.
        setting: keyword argument with the name of a game.
        games: actions by name of a game.
    """
    for game, actions in games.items():
        check_seeded(env_id, {setting: game}, [f"{game}/3", f"{game}/1000004"], actions)
    _check_in_another_process([(env_id, {setting: game}, f"{game}/7", actions) for game, actions in games.items()])


def _check_in_another_process(episodes: Sequence[tuple[str, dict[str, Any], str, list[str]]]) -> None:
    """Check that episodes are the same in a process with another seed of hashes."""
    code = (
        "import pickle, sys; from seeded_games import play; episodes = pickle.load(sys.stdin.buffer); "
        "open(sys.argv[1], 'wb').write(pickle.dumps([play(*episode) for episode in episodes]))"
    )
    with tempfile.NamedTemporaryFile() as answers:
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code, answers.name],
            input=pickle.dumps(episodes),
            env={"PYTHONHASHSEED": "4321", "PYTHONPATH": os.pathsep.join(sys.path)},
            timeout=240,
            check=True,
        )
        assert pickle.loads(Path(answers.name).read_bytes()) == [play(*episode) for episode in episodes]


def _check_copies(env_id: str, settings: dict[str, Any], task: str, actions: Sequence[str], alone: list[Any]) -> None:
    env = make(env_id, settings)
    env.reset(options={"task": task})
    for index, action in enumerate(actions[: len(alone) - 1], start=1):
        copies = [copy.deepcopy(env), pickle.loads(pickle.dumps(env))]
        assert [played.step(action) for played in (env, *copies)] == [alone[index]] * 3
    env.close()
