"""The contract of text environments, checked on a small echo environment."""

import copy
import pickle
import subprocess
import sys

import gymnasium
import numpy as np
import pytest
from echo_env import EchoEnv
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector.utils import batch_space, create_shared_memory, read_from_shared_memory, write_to_shared_memory
from text_games import begin

from trial_envs.core import AnyText
from trial_envs.errors import (
    ClosedEnvError,
    EpisodeOverError,
    ObservationTooLongError,
    RenderModeError,
    UnknownOptionError,
    UnknownTaskError,
)


def test_the_fixed_keys_of_info_and_their_types():
    env = EchoEnv()
    info = {"task": "say 7", "task_id": "7", "family": "odd", "admissible_actions": ["1", "2"], "invalid_action": False}
    assert begin(env, "7") == ("Ünïcode 7", info | {"won": False, "score": 0.0})
    info["admissible_actions"] = ["1"]
    assert env.step("7") == ("7!", 1.0, True, False, info | {"won": True, "score": 1.0})


def test_the_turn_limit_truncates_and_an_invalid_action_costs_a_turn():
    env = EchoEnv(max_turns=2)
    for last, ends in (("no", (False, True)), ("7", (True, False))):  # the last turn may win
        begin(env, "7")
        for action, expected in (("", (False, False)), (last, ends)):
            _, _, terminated, truncated, info = env.step(action)
            assert (terminated, truncated, info["invalid_action"]) == (*expected, not action)


def test_the_seed_chooses_the_task_and_later_resets_go_on_from_it():
    first, again = ([env.reset(seed=seed)[1]["task_id"] for seed in (3, *[None] * 5)] for env in (EchoEnv(), EchoEnv()))
    assert first == again
    assert len(set(first)) > 1
    assert len({EchoEnv().reset(seed=seed)[1]["task_id"] for seed in range(20)}) > 1


def test_a_task_is_chosen_by_its_id_or_by_its_index():
    env = EchoEnv()
    for task in (7, np.int64(7), "7"):
        assert begin(env, task)[1]["task_id"] == "7"
    assert env.reset(seed=3, options={"task": None}) == env.reset(seed=3)
    for task in (50, -1, 7.0, True, -(10**5000), np.array([1, 2])):
        with pytest.raises(UnknownTaskError):
            begin(env, task)
    for options in ({"task": "1", "seed": 2}, "task"):
        with pytest.raises(UnknownOptionError, match="'task'"):
            env.reset(options=options)


def test_a_copy_continues_where_the_original_is():
    env = EchoEnv(max_turns=3, render_mode="ansi")
    env.spec = EnvSpec("Echo-v0")
    env.reset(seed=5, options={"task": 7})
    assert env.render() == "Ünïcode 7\n"
    env.step("no")
    other = copy.deepcopy(env)
    assert other.render() == env.render() == "> no\nno!\n"
    assert other.spec == env.spec
    assert other.step("1") == env.step("1")
    assert other.step("2") == env.step("2")
    assert [other.reset() for _ in range(4)] == [env.reset() for _ in range(4)]
    other.close()
    other.close()
    assert env.freed == 0
    assert other.freed == 1
    with pytest.raises(ClosedEnvError):
        pickle.loads(pickle.dumps(other)).reset()
    with pytest.raises(EpisodeOverError):
        copy.deepcopy(EchoEnv()).step("1")


def test_spaces_contain_every_text_and_nothing_else():
    env = EchoEnv()
    for space in (env.observation_space, env.action_space):
        assert all(text in space for text in ("日本語 é\t\x00", "", space.sample()))
        assert 3 not in space
    assert "abcd" not in AnyText(3)


def test_texts_pass_through_shared_memory():
    """Texts of all lengths and several scripts, and a lone surrogate."""
    space = AnyText(1000)
    assert space == pickle.loads(pickle.dumps(space))
    memory = create_shared_memory(space, n=3)
    shown = read_from_shared_memory(space, memory, n=3)
    assert copy.deepcopy(shown) == ("", "", "")
    for text in ("é日本 😀", "x" * 4000, "", "\ud800\x00", "short"):
        write_to_shared_memory(space, 1, text, memory)
        assert copy.deepcopy(shown) == ("", text, "")
    assert shown[1:] == ("short", "")
    assert copy.deepcopy(shown) in batch_space(space, 3)
    with pytest.raises(ObservationTooLongError, match="4001 characters"):
        write_to_shared_memory(space, 1, "x" * 4001, memory)
    assert shown[1] == "short"


def test_misuse_is_refused():
    env = EchoEnv(max_turns=1)
    with pytest.raises(EpisodeOverError, match="reset"):
        env.step("1")
    env.reset(seed=0)
    with pytest.raises(TypeError, match="got int"):
        env.step(1)
    env.step("no")
    with pytest.raises(EpisodeOverError):
        env.step("no")
    for wrong in (0, 2.5, "3", None):
        with pytest.raises(ValueError, match="max_turns"):
            EchoEnv(max_turns=wrong)


@pytest.mark.parametrize("env_id", sorted(name for name in gymnasium.registry if name.startswith("trial/")))
def test_every_environment_refuses_a_window(env_id):
    with pytest.raises(RenderModeError, match="'human'"):
        gymnasium.make(env_id, render_mode="human")


IMPORTING = """
import sys, warnings
warnings.simplefilter("error")
import gymnasium, trial_envs
trial_envs.register()
assert "trial/ALFWorld-v0" in gymnasium.registry
assert not {"textworld", "alfworld", "fast_downward", "torch", "ray"} & set(sys.modules)
"""


def test_importing_registers_once_and_imports_no_engine():
    subprocess.run([sys.executable, "-c", IMPORTING], check=True, timeout=120)
