"""GEM makes and plays these environments with the observations and rewards of the plain environment."""

import gymnasium
import pytest
from exported_games import CASES, run_example, tagged

from trial_envs.chat import SYSTEM_PROMPT, user_message


@pytest.fixture(scope="module")
def gem():
    library = pytest.importorskip("gem")
    import trial_envs.exports.gem  # noqa: F401

    return library


@CASES
def test_an_episode_is_that_of_the_plain_environment(gem, env_id, settings, task):
    plain, env = gymnasium.make(env_id, **settings), gem.make(env_id, **settings)
    observation, info = plain.reset(options={"task": task})
    shown, shown_info = env.reset(task=task)
    assert shown == f"{SYSTEM_PROMPT}\n\n{user_message(observation, info)}"
    assert shown_info["task_id"] == info["task_id"]
    total = 0.0
    for action in plain.unwrapped.walkthrough:
        observation, reward, terminated, truncated, info = plain.step(action)
        answer = env.step(tagged(action))
        assert answer[:4] == (user_message(observation, info), reward, terminated, truncated)
        assert answer[4]["action"] == action.lower()
        total += reward
    assert terminated
    assert total > 0.0
    env.close()
    env.close()


def test_the_example_of_the_page_runs(gem, capsys):
    assert run_example("peers-gem", capsys).endswith("True 1.0\n")
