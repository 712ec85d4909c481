"""Generated shops: repeatable, varied, and every goal can be reached."""

import pickle

import pytest

from trial_envs.alfworld.env import ALFWorldEnv
from trial_envs.errors import GeneratorSettingError
from trial_envs.webshop import shop_set
from trial_envs.webshop.assortment import KINDS
from trial_envs.webshop.env import WebShopEnv
from trial_envs.webshop.forgetful import ForgetfulExplorer
from trial_envs.webshop.generator import ShopSetting, generate_products
from trial_envs.webshop.reward import option_matches


def test_a_shop_is_a_function_of_its_setting():
    setting = ShopSetting(50, 10, 3)
    assert list(generate_products(setting)) == list(generate_products(setting))
    assert list(generate_products(setting)) != list(generate_products(ShopSetting(50, 10, 4)))
    longer = list(generate_products(ShopSetting(80, 10, 3)))
    assert longer[:50] == list(generate_products(setting))


def test_every_value_that_goals_can_want_matches_itself_and_no_label_has_two_meanings():
    for kind in KINDS:
        labels = [value for values in kind.options.values() for value in values]
        assert len(labels) == len(set(labels)), kind.query
        for name, values in kind.options.items():
            assert all(option_matches(value, (name, value)) for value in values), (kind.query, name)


@pytest.mark.parametrize(
    ("seed", "products", "difficulty"),
    [(1, 200, "official"), (2, 3, "official"), (3, None, "tiny")],
)
def test_every_goal_is_won_by_its_walkthrough_within_the_turns(own_cache, seed, products, difficulty):
    env = WebShopEnv(
        "generated", num_products=products, num_games=120, generator_seed=seed, difficulty=difficulty, max_turns=12
    )
    for task in env.tasks():
        env.reset(options={"task": task})
        for action in env.walkthrough:
            _, _, terminated, truncated, info = env.step(action)
        assert info["won"], (task, info["task"])
        assert terminated
        assert not truncated
    env.close()


def test_goals_are_divided_among_shops_and_are_the_same_however_they_are_reached(own_cache, monkeypatch):
    env = WebShopEnv("generated", num_games=10, difficulty="tiny", num_shops=4)
    assert list(env.tasks()) == [str(number) for number in range(10)]
    played = {}
    for task in env.tasks():
        _, info = env.reset(options={"task": task})
        played[task] = env.catalogue.folder, info["task"]
        for action in env.walkthrough:
            *_, info = env.step(action)
        assert info["won"]
    assert len({folder for folder, _ in played.values()}) == 4
    monkeypatch.setattr(
        shop_set, "MOST_OPEN", 2
    )  # each open shop takes memory mappings, of which a process has so many
    again = pickle.loads(pickle.dumps(env))
    assert {task: again.reset(options={"task": task})[1]["task"] for task in played} == {
        task: wanted for task, (_, wanted) in played.items()
    }
    assert again._shops._open.cache_info().currsize == 2
    _, info = again.reset(options={"task": 6})
    assert (again.catalogue.folder, info["task"]) == played["6"]
    with pytest.raises(GeneratorSettingError, match="Expected num_shops as a whole number from 1, got 0"):
        WebShopEnv("generated", num_shops=0)
    for kind in (WebShopEnv, ALFWorldEnv):
        with pytest.raises(GeneratorSettingError, match="Expected num_games as a whole number from 1, got 0"):
            kind("generated", num_games=0)


def test_the_forgetful_explorer_buys_what_is_wanted_and_its_options_tell_its_choices(own_cache):
    env = WebShopEnv("generated", num_games=60, difficulty="tiny", max_turns=12, generator_seed=5)
    won = 0
    for number, task in enumerate(env.tasks()):
        observation, info = env.reset(options={"task": task})
        explorer, over = ForgetfulExplorer(), False
        explorer.reset(info["task"], observation, number)
        while not over:
            options = explorer.options(observation, info["admissible_actions"])
            action = explorer.act(observation, info["admissible_actions"])
            assert action in options
            assert action.startswith("search[") or action in info["admissible_actions"]
            observation, _, terminated, truncated, info = env.step(action)
            over = terminated or truncated
        won += info["won"]
    env.close()
    assert won >= 40  # it may open the same wrong product again until its turns are over
