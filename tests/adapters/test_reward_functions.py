"""A reward function of an experiment file: how it travels, what the record of a run says of it, and the examples."""

import asyncio
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock, MagicMock

import pytest

from trial_ray.algorithms import GRPOConfig
from trial_ray.errors import ConfigError, RewardError
from trial_ray.rollout.callbacks import RewardFunction
from trial_ray.runs.config_record import SettingChange, from_record, setting_changes, to_record, with_command
from trial_ray.runs.experiment import load_experiment
from trial_ray.trajectory import Trajectory

EXAMPLE = Path(__file__).parents[2] / "tuned_examples/reward_functions.py"


def config_of(reward):
    config = GRPOConfig().environment("trial/ALFWorld-v0", env_config={"split": "generated"})
    return config.rl_module(model_path="some/model").training(reward=reward)


def test_a_function_that_cannot_be_sent_is_refused():
    lock = threading.Lock()

    def locked(episode):
        return lock

    with pytest.raises(ConfigError, match=r"reward function locked cannot be sent.*Create clients, locks"):
        config_of(locked).validate()


def test_a_replay_does_not_need_the_reward_function():
    before, after = (
        json.loads(json.dumps(with_command(None, to_record(config_of(reward)), again=False)))
        for reward in ("success", brief)
    )
    changes = setting_changes([before, {**after, "after_iteration": 3}])
    assert changes == [SettingChange(4, "reward", "success", "function brief")]
    config = from_record(after)
    config.validate()
    assert RewardFunction.of(config) is None
    rated = Trajectory("task", "", 0)
    with pytest.raises(ConfigError, match=r"reward is function brief, which was not called.*reward=FUNCTION"):
        rated.outcome_reward(config.reward)
    rated.function_reward = 0.5
    assert rated.outcome_reward(config.reward) == 0.5


def rated(config, **rewards):
    """Rate an episode to which the environment has given these named rewards."""
    episode = SimpleNamespace(
        turns=[SimpleNamespace(observation=f"room {number}", response_ids=[5] * 5) for number in range(2)],
        responses=["go north", "take mug"],
        task="fetch a mug",
        success=True,
        rewards=rewards,
        environment="e",
        task_id="0",
    )
    asyncio.run(RewardFunction.of(config).rate(episode))
    return episode


def test_the_examples_penalise_length_and_ask_a_judge(monkeypatch):
    episode = rated(load_experiment(EXAMPLE).config)
    assert episode.function_reward == pytest.approx(1 - 0.01 * 10)
    assert episode.rewards == pytest.approx({"solved": 1.0, "length": -10.0, "concise": 0.9})
    for name in ("URL", "MODEL", "KEY"):
        monkeypatch.setenv(f"JUDGE_{name}", name)
    monkeypatch.setattr("openai.AsyncOpenAI", judge := MagicMock())
    create = judge.return_value.__aenter__.return_value.chat.completions.create = AsyncMock()
    create.return_value = SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content="7"))])
    assert rated(load_experiment(EXAMPLE).config).function_reward == pytest.approx(1 + 0.5 * 0.7)
    asked = create.call_args.kwargs
    assert asked["model"] == "MODEL"
    assert "Task: fetch a mug\nroom 0\n> go north\nroom 1\n> take mug\n" in asked["messages"][0]["content"]


def test_a_part_named_like_a_reward_of_the_environment_is_refused():
    with pytest.raises(RewardError, match="the environment has another reward named form"):
        rated(config_of(lambda _: {"form": 1.5}), form=7.0)


def brief(episode):
    return -float(len(episode.turns))


async def solved(episode):
    return episode.success


def silent(episode):
    """Forgets its return statement."""


def several(*functions, **weights):
    return config_of([*functions]).training(reward_weights=weights)


def test_several_functions_are_logged_by_name_and_added_with_weights():
    config = several(brief, solved, brief=0.25)
    config.validate()
    episode = rated(config)
    assert episode.function_reward == pytest.approx(1 - 0.25 * 2)
    assert episode.rewards == pytest.approx({"brief": -2.0, "solved": 1.0, "total": 0.5})
    assert from_record(json.loads(json.dumps(to_record(config)))).reward == "function brief, solved"


def test_a_function_that_returns_none_is_named():
    with pytest.raises(RewardError, match=r"reward function silent, .* it returned None, expected a number"):
        rated(several(solved, silent))


@pytest.mark.parametrize(
    ("cause", "config"),
    {
        "reward_weights names length; expected names of brief, solved": several(brief, solved, length=1.0),
        "brief, brief": several(brief, brief),
        r"reward is \[\]": several(),
        "expected one of": several(brief, "success"),
        "reward is 'sucess', expected one of 'success'.*or a function": config_of("sucess"),
        "reward is 3, expected one of 'success'.*or a function": config_of(3),
    }.items(),
)
def test_unusable_rewards_are_refused(cause, config):
    with pytest.raises(ConfigError, match=cause):
        config.validate()
