"""A fault of an environment fails its rollout, with the environment, task, turn and cause in the error."""

import asyncio
import re

import numpy as np
import pytest
from chat_tokenizers import chat_tokenizer
from faulty_env import TURNS, CountingEnv
from riddle_env import RiddleEnv
from user_env import entry_of

from trial_ray.adapters.guarded import GuardedEnv, StepResult
from trial_ray.adapters.templates import GENERIC
from trial_ray.engines.protocol import Response, SamplingParams
from trial_ray.errors import EnvironmentFaultError
from trial_ray.prompts.single_turn import PromptBuilder
from trial_ray.rollout.episode import PolicyPlayer, play_episode


async def response(prompt_ids, params):
    return Response(np.array([10], np.int32), np.zeros(1, np.float32), 1, "stop")


def play(env, generate=response):
    builder = PromptBuilder(chat_tokenizer("tiny"), GENERIC["plain"], max_prompt_tokens=1000)
    return asyncio.run(play_episode(env, "two", PolicyPlayer(builder, SamplingParams(max_tokens=4), generate)))


@pytest.mark.parametrize(
    ("fault", "told"),
    {
        "creation_raises": "OSError: no such engine",
        "reset_raises": "RuntimeError: cannot start",
        "walkthrough_raises": "LookupError: no solution",
        "step_raises": "KeyError: 'position'",
        "reset=None": "None",
        "reset[1]=None": "info None (NoneType); expected a dict",
        "step=list": "5 values",
        "step[0]=None": "observation None (NoneType); expected a str",
        "step[1]=array": "reward array([[0., 0.], [0., 0.]]) (ndarray); expected a finite number",
        "step[1]=nan": "reward nan (float); expected a finite number",
        "step[2]=5": "terminated 5 (int); expected a bool",
        "step.task=None": "info['task'] None (NoneType); expected a str",
        "step.admissible_actions=list": "info['admissible_actions'] [1] (list); expected a list of str",
        "step.won=None": "info['won'] None (NoneType); expected a bool",
        "step.score=5": "info['score'] 5 (int); expected a number in [0, 1]",
        "step.rewards=nested name": "info['rewards'] {'form/tags': 1.0} (dict); expected",
        "step.rewards=no number": "info['rewards'] {'form': 'good'} (dict); expected",
        "step.rewards=too many": "info['rewards'] {'r0': 0.0, 'r1': 0.0",
        "step.call=nan": "must be a mapping, not float",
    }.items(),
)
def test_environment_fault_fails_the_rollout_and_names_its_place(fault, told):
    """The name of a fault begins with the place where it occurs; the faults of ``step`` occur in the second turn."""
    method = re.match("[a-z]+", fault)[0]
    where = "turn 2" if method == "step" else method
    env = GuardedEnv(entry_of(CountingEnv, {"fault": fault}))
    trajectory = play(env)
    assert (trajectory.ended, trajectory.failed_by) == ("failed", "environment")
    assert trajectory.error.startswith(f"EnvironmentFaultError: {CountingEnv.ENV_ID}, task 'two', {where}: ")
    assert told in trajectory.error
    assert "\n" not in trajectory.error
    assert len(trajectory.turns) == (where == "turn 2")
    assert env.faulty


class NumpyEnv(CountingEnv):
    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        info |= {"won": np.bool_(info["won"]), "score": np.float32(info["score"])}
        return observation, np.float32(reward), np.bool_(terminated), np.bool_(truncated), info


def test_environment_that_keeps_the_contract_plays_to_its_end():
    env = GuardedEnv(entry_of(NumpyEnv))
    trajectory = play(env)
    assert (trajectory.ended, trajectory.score, type(trajectory.turns[-1].reward)) == ("terminated", 1.0, float)
    assert trajectory.success is True
    assert (len(trajectory.turns), trajectory.episode_return, trajectory.family) == (TURNS, 1.0, "counting")
    assert trajectory.solution == ("count",) * TURNS
    assert not env.faulty


def test_error_outside_the_environment_is_raised():
    async def broken(prompt_ids, params):
        raise KeyError("ours")

    env = GuardedEnv(entry_of(CountingEnv))
    with pytest.raises(KeyError, match="ours"):
        play(env, broken)
    assert not env.faulty


def guessed(told=(), **adapter):
    """Results of ``reset`` and ``step`` in a game of one turn, whose ``info`` has only the keys ``told``, and the game."""
    env = GuardedEnv(entry_of(RiddleEnv, {"told": told, "words": ("red",)}, **adapter))
    return env.reset("7", seed=0), env.step("red"), env


def test_adapter_supplies_what_info_lacks():
    """The default score is the clipped return."""
    start, end, env = guessed()
    assert start == StepResult("it begins with r", "", "", (), won=False, score=0.0)
    assert (end.terminated, end.reward, end.won, end.score) == (True, 1.0, False, 1.0)
    assert (env.step("red").score, env.step("blue").score, env.reset("7", seed=0).score) == (1.0, 1.0, 0.0)
    assert guessed(task="guess")[0].task == "guess"
    assert guessed(("task",), task="guess")[0].task == "guess the word"


@pytest.mark.parametrize(
    ("told", "adapter", "won", "score"),
    [
        (("won",), {}, True, 1.0),
        ((), {"success": 1.0}, True, 1.0),
        ((), {"success": 1.5}, False, 1.0),
        (("won",), {"success": lambda info, episode_return: info["won"] and episode_return == 0.5}, False, 1.0),
        ((), {"success": lambda info, episode_return: episode_return == 1.0}, True, 1.0),
        (("won",), {"score": lambda info, episode_return: episode_return / 4}, True, 0.25),
    ],
)
def test_adapter_overrides_success_and_score_of_info(told, adapter, won, score):
    _, end, _ = guessed(told, **adapter)
    assert (end.won, end.score) == (won, score)


def test_infinite_return_is_a_fault():
    class Summing(CountingEnv):
        def step(self, action):
            return "", 1e308, False, False, {}

    env = GuardedEnv(entry_of(Summing))
    env.reset("one", seed=0)
    env.step("count")
    with pytest.raises(EnvironmentFaultError, match=r"turn 2: return inf \(float\); expected a finite number"):
        env.step("count")


def test_tasks_default_to_seeds():
    env = GuardedEnv(entry_of(RiddleEnv))
    assert len({env.reset(str(task), seed=0).observation for task in range(30)}) == 4
    assert env.reset("5", seed=0) == env.reset("5", seed=1)
