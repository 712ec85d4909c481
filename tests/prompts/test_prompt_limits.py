"""What an episode keeps, and what a run says, where prompts do not fit their limit."""

import asyncio
import re
from unittest.mock import Mock

import pytest
from chat_tokenizers import chat_tokenizer
from prompt_games import shown, writer_of
from riddle_env import RiddleEnv
from user_env import entry_of, registered

from trial_ray import GRPOConfig
from trial_ray.adapters.guarded import GuardedEnv
from trial_ray.errors import ConfigError, PromptTooLongError
from trial_ray.rollout.episode import play_episode
from trial_ray.rollout.groups import GroupRequest, GroupSample
from trial_ray.trajectory import Trajectory, TrajectoryGroup, Turn


class LadderEnv(RiddleEnv):
    """Every action is a step up; the score says how far."""

    ENV_ID = "mine/Ladder-v0"

    def reset(self, **arguments):
        self.climbed = 0
        return super().reset(**arguments)

    def step(self, action):
        self.climbed += 1
        return "a step", 0.0, False, False, self._info()

    def _info(self, won=False):
        return {"task": "climb", "won": self.climbed > 2, "score": self.climbed / 4}


@pytest.mark.parametrize("turns", [0, 1, 3])
def test_the_prompt_limit_keeps_success_and_score(turns):
    """A prompt that is too long is reported only if it is the first of its task; only episodes with turns are rated."""

    async def rate(trajectory):
        assert trajectory.turns

    def play(too_long):
        async def climb(result, history, step):
            if step <= turns:
                return Turn(action="climb")
            if too_long:
                raise PromptTooLongError("the prompt has 99 tokens")
            return None

        env, watch = GuardedEnv(entry_of(LadderEnv)), Mock(episode=Trajectory, reward=Mock(rate=rate))
        return asyncio.run(play_episode(env, "7", Mock(act=climb), watch=watch))

    by_turns, by_prompt = map(play, (False, True))
    assert (by_turns.ended, by_prompt.ended) == ("turn_limit", "prompt_limit")
    assert (by_prompt.score, by_prompt.success) == (by_turns.score, by_turns.success) == (turns / 4, turns > 2)
    assert by_prompt.error == f"Ladder-v0, task '7', turn {turns + 1}: the prompt has 99 tokens"
    group = TrajectoryGroup("7", [by_prompt, by_prompt])
    sample = GroupSample.from_group(GroupRequest(0, "7", 2, 0), group, GRPOConfig())
    assert (sample.too_long, sample.num_completed) == (None if turns else by_prompt.error, 2 * (turns > 0))


@pytest.mark.parametrize("style", ["plain", "conversation"])
def test_the_error_contains_the_length_that_fits(style):
    def write(limit, observation="a room", task="find the pencil"):
        writer_of(chat_tokenizer("tiny"), style, limit=limit).write(shown(observation, ["look"] * 40, task), ())

    with pytest.raises(PromptTooLongError, match=r"max_prompt_tokens=30; raise it") as raised:
        write(30)
    length = int(re.search(r"alone make (\d+) tokens", str(raised.value))[1])
    write(length)
    with pytest.raises(PromptTooLongError, match=f"alone make {length} tokens"):
        write(length - 1)
    with pytest.raises(PromptTooLongError, match="alone make more than 30 tokens"):
        write(30, "a room \ud800\x00 " * 9_999, "find the pencil " * 9_999)


@pytest.mark.parametrize(
    ("max_prompt_tokens", "max_outcome_tokens", "error", "told"),
    [
        (
            20,
            512,
            PromptTooLongError,
            r"^Riddle-v0, task '\d+', turn 1: .* alone make \d+ tokens, more than max_prompt_tokens=20; raise it$",
        ),
        (2048, 14, ConfigError, r"^max_outcome_tokens is 14, expected more than \d+: "),
    ],
)
@registered(RiddleEnv)
def test_too_small_limits_are_refused_before_any_actor_starts(
    model_path, max_prompt_tokens, max_outcome_tokens, error, told, monkeypatch
):
    def start(*arguments, **settings):
        raise AssertionError("an actor was about to start")

    monkeypatch.setattr("trial_ray.algorithms.grpo.create_engines", start)
    monkeypatch.setattr("trial_ray.algorithms.grpo.require_resources", start)
    monkeypatch.setattr("ray.cluster_resources", dict)
    config = GRPOConfig().environment(RiddleEnv.ENV_ID).rl_module(model_path=model_path)
    config.training(teacher_context="outcome", max_outcome_tokens=max_outcome_tokens)
    config.env_runners(num_env_runners=1, prompt_style="plain", max_prompt_tokens=max_prompt_tokens)
    with pytest.raises(error, match=told):
        config.build_algo()
