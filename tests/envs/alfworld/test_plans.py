"""How many commands still win: the library's planner against the solution and against a search on the real engine."""

from __future__ import annotations

import pytest

from trial_envs.alfworld.env import ALFWorldEnv
from trial_envs.alfworld.families import FAMILIES
from trial_envs.errors import ClosedEnvError


@pytest.fixture
def env():
    made = ALFWorldEnv("generated", difficulty="medium", num_games=12, families=FAMILIES)
    yield made
    made.close()


def test_the_solution_is_counted_down(env):
    for task_id in env.tasks():
        env.reset(options={"task": task_id})
        remaining = [env.commands_to_win()]
        for command in env.walkthrough:
            env.step(command)
            remaining.append(env.commands_to_win())
        assert remaining == list(range(len(env.walkthrough), -1, -1))


def test_a_detour_takes_longer_and_what_changes_nothing_does_not(env):
    task_id = env.tasks()[0]
    _, info = env.reset(options={"task": task_id})
    length = env.commands_to_win()
    env.step("inventory")
    assert env.commands_to_win() == length
    taken = env.walkthrough[0].removeprefix("go to ")
    elsewhere = next(a for a in info["admissible_actions"] if a.startswith("go to ") and taken not in a)
    env.step(elsewhere)
    assert env.commands_to_win() >= length
    env.reset(options={"task": task_id})
    assert env.commands_to_win() == length


def test_no_plan_is_shorter_than_the_shortest():
    """Breadth-first over everything that the engine admits, in games small enough for it."""
    env = ALFWorldEnv("generated", difficulty="tiny", num_games=4, max_turns=50)
    for task_id in env.tasks():
        env.reset(options={"task": task_id})
        told = env.commands_to_win()
        assert told is not None
        assert told == _shortest(env, task_id, told)
    env.close()


def _shortest(env, task_id: str, most: int) -> int:
    """Length of the shortest solution of at most ``most`` commands."""
    level: list[tuple[str, ...]] = [()]
    seen: set[tuple[str, ...]] = set()
    for length in range(1, most + 1):
        following = []
        for path in level:
            _, info = env.reset(options={"task": task_id})
            for command in path:
                _, _, _, _, info = env.step(command)
            for command in info["admissible_actions"]:
                if command.split()[0] in ("help", "look", "inventory", "examine"):
                    continue
                env.reset(options={"task": task_id})
                for earlier in path:
                    env.step(earlier)
                _, _, _, _, after = env.step(command)
                if after["won"]:
                    return length
                state = tuple(after["admissible_actions"])
                if state not in seen:
                    seen.add(state)
                    following.append((*path, command))
        level = following
    return most + 1


def test_without_a_game_there_is_no_plan(env):
    with pytest.raises(ClosedEnvError, match="no game is running"):
        env.commands_to_win()
