"""What goes wrong inside somebody's environment ends that rollout alone, and is told as what it is."""

from __future__ import annotations

import asyncio
import logging

import numpy as np
import pytest
from chat_tokenizers import chat_tokenizer
from faulty_env import ENV_ID, TURNS, CountingEnv

from trial_ray.errors import EnvironmentFaultError
from trial_ray.inference.protocol import Response, SamplingParams
from trial_ray.rollout.episode import EpisodePlayer
from trial_ray.rollout.guarded_env import GuardedEnv
from trial_ray.rollout.prompts import PromptBuilder


def guarded(**settings) -> GuardedEnv:
    return GuardedEnv(lambda: CountingEnv(**settings), ENV_ID)


def play(env: GuardedEnv, generate=None):
    tokenizer = chat_tokenizer("tiny")
    builder = PromptBuilder(tokenizer, ENV_ID, max_prompt_tokens=1000, style="plain")
    player = EpisodePlayer(builder, tokenizer.decode, SamplingParams(max_tokens=4), seeded=False)

    async def response(prompt_ids: np.ndarray, params: SamplingParams) -> Response:
        ids = np.asarray(tokenizer.encode("look"), np.int32)
        return Response(ids, np.zeros(len(ids), np.float32), 1, "stop")

    return asyncio.run(player.play(env, "two", 0, 0, generate or response))


def test_an_environment_that_keeps_the_contract_plays_to_its_end():
    env = guarded()
    trajectory = play(env)
    assert (trajectory.ended, trajectory.success, trajectory.score) == ("terminated", True, 1.0)
    assert (len(trajectory.turns), trajectory.episode_return, trajectory.family) == (TURNS, 1.0, "counting")
    assert trajectory.solution == ("count",) * TURNS
    assert not env.faulty


@pytest.mark.parametrize(
    ("fault", "where", "told"),
    [
        ("creation_raises", "creation", "OSError: no such engine"),
        ("reset_raises", "reset", "RuntimeError: cannot start"),
        ("walkthrough_raises", "walkthrough", "LookupError: no solution"),
        ("step_raises", "turn 2", "KeyError: 'position'"),
        ("reset=None", "reset", "None"),
        ("reset[0]=bytes", "reset", "observation b'x' (bytes); expected a str"),
        ("reset[1]=None", "reset", "info None (NoneType); expected a dict"),
        ("reset.family=missing", "reset", "without 'family'"),
        ("step=list", "turn 2", "5 values"),
        ("step[0]=None", "turn 2", "observation None (NoneType); expected a str"),
        ("step[1]=high", "turn 2", "reward 'high' (str); expected a finite number"),
        ("step[1]=array", "turn 2", "reward array([[0., 0.], [0., 0.]]) (ndarray); expected a finite number"),
        ("step[1]=nan", "turn 2", "reward nan (float); expected a finite number"),
        ("step[1]=inf", "turn 2", "reward inf (float); expected a finite number"),
        ("step[2]=5", "turn 2", "terminated 5 (int); expected a bool"),
        ("step[3]=None", "turn 2", "truncated None (NoneType); expected a bool"),
        ("step[4]=list", "turn 2", "info [1] (list); expected a dict"),
        ("step.task=missing", "turn 2", "without 'task'"),
        ("step.task=None", "turn 2", "info['task'] None (NoneType); expected a str"),
        ("step.family=5", "turn 2", "info['family'] 5 (int); expected a str"),
        ("step.admissible_actions=wait", "turn 2", "info['admissible_actions'] 'wait' (str); expected a list of str"),
        ("step.admissible_actions=list", "turn 2", "info['admissible_actions'] [1] (list); expected a list of str"),
        ("step.won=None", "turn 2", "info['won'] None (NoneType); expected a bool"),
        ("step.score=nan", "turn 2", "info['score'] nan (float); expected a number in [0, 1]"),
        ("step.score=5", "turn 2", "info['score'] 5 (int); expected a number in [0, 1]"),
        ("step.score=high", "turn 2", "info['score'] 'high' (str); expected a number in [0, 1]"),
    ],
)
def test_a_fault_of_the_environment_fails_the_rollout_and_names_environment_task_turn_and_cause(fault, where, told):
    env = guarded(fault=fault)
    trajectory = play(env)
    assert trajectory.failed
    assert trajectory.error.startswith(f"EnvironmentFaultError: {ENV_ID}, task 'two', {where}: ")
    assert told in trajectory.error
    assert "\n" not in trajectory.error
    assert len(trajectory.turns) == (where == "turn 2")
    assert env.faulty


def test_numbers_and_truth_values_of_numpy_are_as_good_as_pythons():
    class NumpyEnv(CountingEnv):
        def step(self, action):
            observation, reward, terminated, truncated, info = super().step(action)
            info |= {"won": np.bool_(info["won"]), "score": np.float32(info["score"])}
            return observation, np.float32(reward), np.bool_(terminated), np.bool_(truncated), info

    trajectory = play(GuardedEnv(NumpyEnv, ENV_ID))
    assert (trajectory.ended, trajectory.success, trajectory.score) == ("terminated", True, 1.0)
    assert type(trajectory.success) is bool
    assert type(trajectory.turns[-1].reward) is float


def test_a_bug_outside_the_environment_is_not_taken_for_its_fault():
    async def broken(prompt_ids, params):
        raise KeyError("ours")

    env = guarded()
    with pytest.raises(KeyError, match="ours"):
        play(env, broken)
    assert not env.faulty


def test_closing_is_told_in_the_log_where_it_fails(caplog):
    env = guarded(fault="close_raises")
    assert not play(env).failed
    with caplog.at_level(logging.WARNING):
        env.close()
    assert "cannot close" in caplog.text


def test_an_environment_that_was_never_made_needs_no_closing(caplog):
    env = guarded(fault="creation_raises")
    play(env)
    with caplog.at_level(logging.WARNING):
        caplog.clear()
        env.close()
    assert not caplog.text


def test_the_error_keeps_the_cause():
    with pytest.raises(EnvironmentFaultError) as caught:
        guarded(fault="reset_raises").reset("two", seed=0)
    assert isinstance(caught.value.__cause__, RuntimeError)
