"""The contract of text environments, checked on a small counting environment."""

import copy
import multiprocessing
import pickle
import subprocess
import sys
from collections.abc import Sequence
from functools import partial

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector.utils import batch_space, create_shared_memory, read_from_shared_memory, write_to_shared_memory

from trial_envs.alfworld.env import ALFWorldEnv
from trial_envs.core import AnyText, Outcome, TextEnv
from trial_envs.errors import (
    ClosedEnvError,
    EpisodeOverError,
    ObservationTooLongError,
    RenderModeError,
    UnknownOptionError,
    UnknownTaskError,
)


class CountingEnv(TextEnv):
    """The action that is the task's number wins; the engine does not understand ``error``."""

    def __init__(self, max_turns: int = 3, render_mode: str | None = None) -> None:
        super().__init__("numbers", max_turns, render_mode)
        self.freed = 0
        self.failing = False

    def tasks(self, split: str | None = None) -> Sequence[str]:
        return [str(n) for n in range(50)]

    def family(self, task_id: str) -> str:
        return "even" if int(task_id) % 2 == 0 else "odd"

    def _start(self, task_id: str) -> tuple[str, Outcome]:
        self._run()
        self.wanted = task_id
        return f"say {task_id}", Outcome("Ünïcode 你好\n", ("1", "2"))

    def _advance(self, action: str) -> Outcome:
        self._run()
        won = action == self.wanted
        return Outcome("so", ("1",), float(won), float(won), won, won, invalid_action=action == "error")

    def _free(self) -> None:
        self.freed += 1

    def _run(self) -> None:
        if self.failing:
            raise OSError("no engine")


def test_the_fixed_keys_of_info_and_their_types():
    env = CountingEnv()
    observation, info = env.reset(options={"task": "7"})
    assert observation == "Ünïcode 你好\n"
    assert info == {
        "task": "say 7",
        "task_id": "7",
        "family": "odd",
        "admissible_actions": ["1", "2"],
        "won": False,
        "score": 0.0,
        "invalid_action": False,
    }
    _, reward, terminated, truncated, info = env.step("7")
    assert (reward, terminated, truncated, info["won"], info["score"]) == (1.0, True, False, True, 1.0)


def test_the_turn_limit_truncates_and_an_invalid_action_costs_a_turn():
    env = CountingEnv(max_turns=2)
    env.reset(options={"task": "7"})
    _, _, terminated, truncated, info = env.step("error")
    assert (terminated, truncated, info["invalid_action"]) == (False, False, True)
    _, reward, terminated, truncated, info = env.step("no")
    assert (reward, terminated, truncated, info["invalid_action"]) == (0.0, False, True, False)
    env = CountingEnv(max_turns=1)
    env.reset(options={"task": "7"})
    assert env.step("7")[2:4] == (True, False)  # the last turn wins


def test_the_seed_chooses_the_task_and_later_resets_go_on_from_it():
    env, other = CountingEnv(), CountingEnv()
    first = [env.reset(seed=3)[1]["task_id"]] + [env.reset()[1]["task_id"] for _ in range(5)]
    again = [other.reset(seed=3)[1]["task_id"]] + [other.reset()[1]["task_id"] for _ in range(5)]
    assert first == again
    assert len(set(first)) > 1
    assert {CountingEnv().reset(seed=s)[1]["task_id"] for s in range(20)} != {first[0]}


def test_a_task_is_chosen_by_its_id_or_by_its_index():
    env = CountingEnv()
    for task in (7, np.int64(7), "7"):
        assert env.reset(options={"task": task})[1]["task_id"] == "7"
    assert env.reset(seed=3, options={"task": None}) == env.reset(seed=3)


@pytest.mark.parametrize(
    "task",
    [
        50,
        -1,
        7.0,
        True,
        b"7",
        ["7"],
        -(10**5000),
        np.array([1, 2]),
    ],
    ids=lambda task: type(task).__name__,
)
def test_a_task_that_is_no_id_or_index_is_refused(task):
    with pytest.raises(UnknownTaskError):
        CountingEnv().reset(options={"task": task})


@pytest.mark.parametrize("options", [{"game": "1"}, {"task": "1", "seed": 2}, "task", 3, [], {1: 2}])
def test_unknown_options_are_refused(options):
    with pytest.raises(UnknownOptionError, match="'task'"):
        CountingEnv().reset(options=options)


DUPLICATES = pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))],
    ids=["copy", "deepcopy", "pickle"],
)


@DUPLICATES
def test_a_copy_continues_where_the_original_is(duplicate):
    env = CountingEnv(max_turns=3, render_mode="ansi")
    env.reset(seed=5)
    assert env.render() == "Ünïcode 你好\n\n"
    env.step("no")
    other = duplicate(env)
    assert other.render() == env.render() == "> no\nso\n"
    assert [other.step("1"), other.step("2")] == [env.step("1"), env.step("2")]
    assert [other.reset() for _ in range(4)] == [env.reset() for _ in range(4)]
    other.close()
    assert env.freed == 0
    with pytest.raises(ClosedEnvError):
        duplicate(other).reset()
    with pytest.raises(EpisodeOverError):
        duplicate(CountingEnv()).step("1")


def test_spaces_contain_every_text_and_nothing_else():
    env = CountingEnv()
    observation, _ = env.reset(seed=0)
    assert observation in env.observation_space
    assert "日本語 é\t\x00" in env.action_space
    assert "" in env.action_space
    assert 3 not in env.action_space
    assert "abcd" not in AnyText(3)
    assert env.action_space.sample() in env.action_space


def test_texts_pass_through_shared_memory():
    """Texts of all lengths and several scripts, and a lone surrogate."""
    texts = ["é日本 😀", "x" * 1000, "", "\ud800\x00", "short"]
    space = AnyText(1000)
    assert space == pickle.loads(pickle.dumps(space))
    ctx = multiprocessing.get_context("fork")
    memory = create_shared_memory(space, n=3, ctx=ctx)
    shown = read_from_shared_memory(space, memory, n=3)
    assert copy.deepcopy(shown) == ("", "", "")
    for text in texts:
        writer = ctx.Process(target=write_to_shared_memory, args=(space, 1, text, memory))
        writer.start()
        writer.join(60)
        assert copy.deepcopy(shown) == ("", text, "")
        assert copy.deepcopy(shown) in batch_space(space, 3)
    assert shown[1:] == (texts[-1], "")


def test_a_write_to_shared_memory_copies_the_text_alone():
    """The speed of a vector environment must not depend on the maximum length of its texts."""
    space = AnyText(1000)
    memory = create_shared_memory(space, n=1)
    view = memory[0].create_memoryview()
    view[:] = b"\xff" * len(view)
    write_to_shared_memory(space, 0, "short", memory)
    assert bytes(view).rstrip(b"\xff") == (5).to_bytes(8, "little") + b"short"
    write_to_shared_memory(space, 0, "é" * 2000, memory)  # more characters than the limit, but few enough bytes
    assert read_from_shared_memory(space, memory)[0] == "é" * 2000
    with pytest.raises(ObservationTooLongError, match="4001 characters"):
        write_to_shared_memory(space, 0, "x" * 4001, memory)
    assert read_from_shared_memory(space, memory)[0] == "é" * 2000


def test_misuse_is_refused():
    env = CountingEnv(max_turns=1)
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
            CountingEnv(max_turns=wrong)


@pytest.mark.parametrize("env_id", sorted(name for name in gymnasium.registry if name.startswith("trial/")))
def test_every_environment_refuses_a_window(env_id):
    with pytest.raises(RenderModeError, match="'human'"):
        gymnasium.make(env_id, render_mode="human")


@pytest.mark.filterwarnings("ignore:.*Not able to test alternative render modes")
@pytest.mark.parametrize(
    "make",
    [
        CountingEnv,
        partial(gymnasium.make, "trial/ALFWorld-v0", split="generated", difficulty="tiny"),
        partial(gymnasium.make, "trial/TextWorld-v0", level=1, num_games=1),
    ],
    ids=["contract", "ALFWorld", "TextWorld"],
)
def test_gymnasium_accepts_the_environment(make):
    env = make(render_mode="ansi").unwrapped
    check_env(env, skip_render_check=not isinstance(env, CountingEnv | ALFWorldEnv))
    env.close()


def test_importing_registers_once_and_imports_no_engine():
    code = (
        "import sys, warnings; warnings.simplefilter('error'); import gymnasium, trial_envs;"
        "trial_envs.register();"
        "assert 'trial/ALFWorld-v0' in gymnasium.registry;"
        "assert not {'textworld', 'alfworld', 'fast_downward', 'torch', 'ray'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
