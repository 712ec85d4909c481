"""Generated shops: repeatable, varied, and every goal can be reached."""

import pickle

import pytest
from text_games import begin, play_expert, win

from trial_envs.webshop import shop_set
from trial_envs.webshop.env import WebShopEnv
from trial_envs.webshop.forgetful import ForgetfulExplorer


@pytest.mark.parametrize(
    ("seed", "products", "difficulty"),
    [(1, 200, "official"), (2, 3, "official"), (3, None, "tiny")],
)
def test_every_goal_is_won_by_its_walkthrough(own_cache, seed, products, difficulty):
    env = WebShopEnv(
        "generated", num_products=products, num_games=120, generator_seed=seed, difficulty=difficulty, max_turns=12
    )
    for task in env.tasks():
        win(env, task)


def test_goals_are_divided_among_shops_in_a_fixed_way(own_cache, monkeypatch):
    env = WebShopEnv("generated", num_games=10, difficulty="tiny", num_shops=4)
    played = {task: (win(env, task)[4]["task"], env.catalogue.folder) for task in env.tasks()}
    assert len({folder for _, folder in played.values()}) == 4
    monkeypatch.setattr(shop_set, "MAX_OPEN", 2)  # a process has a limited number of memory mappings
    again = pickle.loads(pickle.dumps(env))
    for task in [*played, "6"]:
        assert (begin(again, task)[1]["task"], again.catalogue.folder) == played[task]
    assert again._shops._open.cache_info().currsize == 2


def test_the_forgetful_explorer_acts_within_its_options_and_wins(own_cache):
    env = WebShopEnv("generated", num_games=60, difficulty="tiny", max_turns=12, generator_seed=5)
    won = [info["won"] for info, _ in play_expert(env, ForgetfulExplorer, check=lambda *_: None)]
    assert sum(won) >= 40  # it may open the same wrong product until its turns are over
