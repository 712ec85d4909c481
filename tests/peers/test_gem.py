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
    import trial_envs.gem  # noqa: F401

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


def test_a_seed_draws_the_task_that_it_draws_in_gymnasium(gem):
    env_id, settings, _ = CASES[0]
    plain, env = gymnasium.make(env_id, **settings), gem.make(env_id, **settings)
    for seed in (5, None, 7):
        assert env.reset(seed=seed)[1]["task_id"] == plain.reset(seed=seed)[1]["task_id"]


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


def test_gems_wrappers_concatenate_the_history(gem):
    from gem.wrappers.wrapper_factory import get_wrapper_fns

    env_id, settings, _ = CASES[0]
    env = gem.make(env_id, **settings)
    for wrap in get_wrapper_fns("concat_with_action"):
        env = wrap(env)
    first, _ = env.reset(seed=0)
    second, *_ = env.step(tagged("inventory"))
    assert second.startswith(first)
    assert tagged("inventory") in second


def test_a_spawned_environment_continues_or_starts_again(gem):
    env_id, settings, task = CASES[0]
    env = gem.make(env_id, **settings)
    env.reset(task=task)
    env.step(tagged("look"))
    twin = env.spawn(same_state=True)
    response = env.sample_random_action()
    assert twin.step(response)[0] == env.step(response)[0]
    other = env.spawn(max_turns=1)
    other.reset(task=task)
    assert other.step("")[3]
    with pytest.raises(ValueError, match="same settings"):
        env.spawn(same_state=True, max_turns=1)


def test_the_page_shows_it(gem, capsys):
    (code,) = snippets("environments.md", "peers-gem")
    exec(compile(code, "docs/environments.md, GEM", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.endswith("True 1.0\n")
