"""TextWorld's generated games keep the same contract as every other text environment."""

import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from text_games import begin

from trial_envs.errors import GeneratorSettingError, UnknownSplitError, UnknownTaskError
from trial_envs.textworld.env import _MAKING, TextWorldEnv

COIN, TREASURE = "coin_collector-3-7", "treasure_hunter-3-8"


@pytest.fixture(scope="module")
def env():
    return TextWorldEnv(level=3)


@pytest.mark.parametrize("task", [COIN, TREASURE])
def test_the_walkthrough_is_admissible_and_wins(env, task):
    """What is no admissible command changes nothing."""
    observation, info = begin(env, task)
    assert observation.startswith(info["task"])
    assert info["task_id"] == task
    assert info["family"] == task.split("-")[0]
    assert info["score"] == 0.0
    for wrong in ("", "look. look", "take coin\n"):
        answer = ("That's not a verb I recognise.", 0.0, False, False, info | {"invalid_action": True})
        assert env.step(wrong) == answer
    assert not env.step(" look ")[-1]["invalid_action"]
    for command in env.walkthrough:
        assert not info["won"]
        assert command in info["admissible_actions"]
        observation, *answer, info = env.step(command)
        assert not info["invalid_action"]
    assert answer == [1.0, True, False]
    assert info["won"]
    assert info["score"] == 1.0
    assert "The End" in observation


PLAYING = f"""
from trial_envs.textworld.env import TextWorldEnv
import pickle, sys
env = TextWorldEnv()
answers = [env.reset(options={{"task": {COIN!r}}})]
answers += [env.step(command) for command in env.walkthrough]
env.close()
sys.stdout.buffer.write(pickle.dumps(answers))
"""


def test_a_game_is_a_pure_function_of_its_id(env):
    surroundings = os.environ | {"PYTHONHASHSEED": "11"}
    output = subprocess.check_output([sys.executable, "-c", PLAYING], timeout=120, env=surroundings)
    assert pickle.loads(output) == [begin(env, COIN), *(env.step(command) for command in env.walkthrough)]


def test_splits_share_no_game_and_lists_are_fixed():
    env = TextWorldEnv(level=2, num_games=3)
    assert env.tasks() == ["coin_collector-2-0", "treasure_hunter-2-1", "coin_collector-2-2"]
    assert not set(env.tasks("train")) & set(env.tasks("test"))


def test_unknown_settings_and_tasks(env):
    with pytest.raises(UnknownSplitError, match="'valid'"):
        TextWorldEnv("valid")
    for name, values in {"level": (31, 0), "families": (["cooking"], []), "num_games": (0, 1_000_001)}.items():
        for value in values:
            with pytest.raises(GeneratorSettingError):
                TextWorldEnv(**{name: value})
    for task in ("", "coin_collector", "coin_collector-301-0", "treasure_hunter-31-0", f"{COIN}\n", "cooking-1-1"):
        with pytest.raises(UnknownTaskError):
            begin(env, task)


def test_no_process_is_forked_while_a_library_is_unloaded(monkeypatch):
    """Every fork waits for this lock. Otherwise, a child could not load an interpreter's library, and would hang."""
    env = TextWorldEnv(level=1)
    env.reset(seed=0)
    close, free = env._game.close, []

    def closing():
        with ThreadPoolExecutor() as other:
            free.append(other.submit(_MAKING.acquire, blocking=False).result(60))
        close()

    monkeypatch.setattr(env._game, "close", closing)
    env.close()
    assert free == [False]
