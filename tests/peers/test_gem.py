"""GEM makes and plays our environments; its observations and rewards are those of the plain environment."""

import gymnasium
import pytest
from snippets import snippets

from trial_envs.chat import SYSTEM_PROMPT, user_message

pytestmark = pytest.mark.peers

CASES = [
    ("trial/ALFWorld-v0", {"split": "generated", "difficulty": "tiny"}, 3),
    ("trial/WebShop-v0", {"split": "generated", "difficulty": "tiny", "num_games": 10}, 2),
    ("trial/TextWorld-v0", {"level": 1}, "coin_collector-1-0"),
]


@pytest.fixture(scope="module")
def gem():
    library = pytest.importorskip("gem")
    import trial_envs.exports.gem  # noqa: F401

    return library


def tagged(action: str) -> str:
    return f"<think>so</think><action>{action}</action>"


@pytest.mark.parametrize(("env_id", "settings", "task"), CASES, ids=lambda value: str(value)[:30])
def test_an_episode_is_that_of_the_plain_environment(gem, env_id, settings, task):
    plain, env = gymnasium.make(env_id, **settings), gem.make(env_id, **settings)
    observation, info = plain.reset(options={"task": task})
    shown, shown_info = env.reset(task=task)
    assert shown == f"{SYSTEM_PROMPT}\n\n{user_message(observation, info)}"
    assert shown_info["task_id"] == info["task_id"]
    terminated, total = False, 0.0
    for action in plain.unwrapped.walkthrough:
        observation, reward, terminated, truncated, info = plain.step(action)
        answer = env.step(tagged(action))
        assert answer[:4] == (user_message(observation, info), reward, terminated, truncated)
        assert answer[4]["action"] == action
        total += reward
    assert terminated
    assert total > 0.0
    env.close()
    env.close()


@pytest.mark.parametrize("async_mode", [False, True])
def test_a_vector_of_environments_steps(gem, async_mode):
    env_id, settings, _ = CASES[0]
    envs = gem.make_vec([env_id, env_id], async_mode=async_mode, seed=3, **settings)
    _, infos = envs.reset()
    plain = gymnasium.make(env_id, **settings)
    assert [info["task_id"] for info in infos] == [plain.reset(seed=3 + i)[1]["task_id"] for i in range(2)]
    _, rewards, terminations, truncations, infos = envs.step([tagged("look"), "nothing"])
    assert [info["invalid_action"] for info in infos] == [False, True]
    assert not any([*rewards, *terminations, *truncations])


def test_the_page_shows_it(gem, capsys):
    (code,) = snippets("environments.md", "peers-gem")
    exec(compile(code, "docs/environments.md, GEM", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.endswith("True 1.0\n")
