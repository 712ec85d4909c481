"""SkyRL-gym makes and plays these environments with the messages and rewards of the plain environment."""

import gymnasium
import pytest
from exported_games import CASES, run_example, tagged

from trial_envs.chat import SYSTEM_PROMPT, user_message


@pytest.fixture(scope="module")
def skyrl_gym():
    library = pytest.importorskip("skyrl_gym")
    import trial_envs.exports.skyrl_gym  # noqa: F401

    return library


@CASES
def test_an_episode_is_that_of_the_plain_environment(skyrl_gym, env_id, settings, task):
    plain = gymnasium.make(env_id, **settings)
    env = skyrl_gym.make(env_id, env_config=settings, extras={"task": task})
    observation, info = plain.reset(options={"task": task})
    conversation, metadata = env.init([])
    assert conversation == [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": user_message(observation, info)},
    ]
    assert metadata["task_id"] == info["task_id"]
    total = 0.0
    for action in plain.unwrapped.walkthrough:
        observation, reward, terminated, truncated, info = plain.step(action)
        answer = env.step(tagged(action))
        done, total = answer["done"], total + reward
        assert answer["reward"] == reward
        assert done == (terminated or truncated)
        assert answer["metadata"]["observation"] == observation
        assert answer["metadata"]["invalid_response"] is False
        message = {"role": "user", "content": user_message(observation, info)}
        assert answer["observations"] == ([] if done else [message])
    assert done
    assert total > 0.0
    assert env.get_metrics() == {
        "total_reward": total,
        "won": float(info["won"]),
        "score": info["score"],
        "turns": len(plain.unwrapped.walkthrough),
        "invalid_responses": 0.0,
    }
    assert type(env).aggregate_metrics([env.get_metrics()] * 2)["total_reward"] == total
    env.close()
    env.close()


def test_the_generators_turn_limit_truncates(skyrl_gym):
    from omegaconf import DictConfig

    settings = DictConfig({"split": "generated", "difficulty": "tiny", "families": ["pick_and_place_simple"]})
    env = skyrl_gym.make("trial/ALFWorld-v0", env_config=settings, extras={"max_turns": 2})
    env.init([])
    assert [env.step("<action>look</action>")["done"] for _ in range(2)] == [False, True]


def test_the_example_of_the_page_runs(skyrl_gym, capsys):
    assert run_example("peers-skyrl-gym", capsys).endswith("True 1.0\n")
