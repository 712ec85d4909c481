"""Environments of other libraries: ids, splits, settings, and the error for a missing library."""

import itertools
import random
import sys

import gymnasium
import pytest

import trial_envs  # noqa: F401  registers the ids
from trial_envs.core import Outcome
from trial_envs.errors import GeneratorSettingError, MissingEngineError, MissingPackageError, UnknownSplitError
from trial_envs.imports.seeded_env import FIRST_SEEDS, MAX_GAMES, SeededEnv, plain_settings


class DiceEnv(SeededEnv):
    """Every action throws two dice."""

    def __init__(self, split="train", num_games=4):
        super().__init__("set/dice", split, num_games, 3, ("throw",), None)

    def _begin(self, seed):
        self.sum = 0
        return "Throw.", self._thrown()

    def _play(self, action):
        return self._thrown()

    def _thrown(self):
        self.sum += dice()
        return Outcome(f"{self.sum}", self._listed)

    def _free(self):
        pass


def dice():
    return random.randint(1, 6) + random.randint(1, 6)


def sums(env, task):
    return [env.reset(options={"task": task})[0], *(env.step("throw")[0] for _ in range(2))]


def expected(seed):
    random.seed(seed)
    return [*map(str, itertools.accumulate(dice() for _ in range(3)))]


def test_a_task_is_a_name_and_a_seed():
    env = DiceEnv()
    assert env.tasks() == [f"set/dice/{number}" for number in range(4)]
    assert env.family("set/dice/3") == "set/dice"
    assert sums(env, "set/dice/999999999") == expected(999_999_999)
    assert [sums(env, task) for task in env.tasks("test")] == [expected(2_000_000 + number) for number in range(4)]


def test_splits_share_no_seed():
    starts = sorted(FIRST_SEEDS.values())
    assert all(after - before == MAX_GAMES for before, after in itertools.pairwise(starts))
    with pytest.raises(UnknownSplitError, match=r"'dev'.*train"):
        DiceEnv(split="dev")
    with pytest.raises(GeneratorSettingError, match="at most 1000000"):
        DiceEnv(num_games=MAX_GAMES + 1)


def test_settings_for_the_library_are_checked():
    for settings, cause in (([1], "as a dict"), ({1: 2}, "as a dict"), ({"seed": 1, "low": 2}, "sets seed")):
        with pytest.raises(GeneratorSettingError, match=cause):
            plain_settings("game_args", settings, reserved=("seed",))


@pytest.mark.parametrize(
    ("env_id", "package", "extra"),
    [
        ("trial/ReasoningGym-v0", "reasoning_gym", "reasoning-gym"),
        ("trial/GEM-v0", "gem", "gem"),
        ("trial/OpenEnv-v0", "openenv", "openenv<"),
    ],
)
def test_a_missing_library_is_named_with_its_extra(env_id, package, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises((MissingEngineError, MissingPackageError), match=rf"{package}.*pip install '{extra}"):
        gymnasium.make(env_id, disable_env_checker=True).reset(seed=0)
