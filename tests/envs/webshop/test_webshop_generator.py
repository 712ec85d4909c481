"""Generated shops: repeatable, varied, and every goal can be reached."""

import pickle
import re

import pytest

from trial_envs.errors import GeneratorSettingError
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


def test_products_are_complete_and_of_all_departments():
    products = list(generate_products(ShopSetting(300, 1, 0)))
    assert len({product.asin for product in products}) == 300
    assert {product.category for product in products} == {"beauty", "electronics", "fashion", "garden", "grocery"}
    assert any(len(product.price_range) == 2 for product in products)
    assert any(product.reviews for product in products)
    for product in products:
        assert len(product.asin) == 10
        assert all(len(values) >= 2 for values in product.options.values())
        assert set(product.title_nouns) <= set(product.title.lower().replace(",", " ").split())


def test_every_value_that_goals_can_want_matches_itself_and_no_label_has_two_meanings():
    for kind in KINDS:
        labels = [value for values in kind.options.values() for value in values]
        assert len(labels) == len(set(labels)), kind.query
        for name, values in kind.options.items():
            assert all(option_matches(value, (name, value)) for value in values), (kind.query, name)


@pytest.mark.parametrize(
    ("seed", "products", "difficulty"),
    [(0, 40, "official"), (1, 200, "official"), (2, 3, "official"), (3, None, "tiny")],
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


def test_reviews_are_shown(own_cache):
    env = WebShopEnv("generated", num_products=30, num_games=1)
    shop = env.catalogue
    product = next(shop.product(n) for n in range(30) if shop.product(n).reviews)
    env.reset(options={"task": 0})
    for action in (f"search[{product.title}]", f"click[{product.asin.lower()}]", "click[reviews]"):
        observation, *_ = env.step(action)
    review = product.reviews[0]
    assert f'"{review.title}" [SEP] {review.score} [SEP] {review.body}' in observation


@pytest.mark.parametrize(
    "numbers", [(0, 1, 0), (1, 0, 0), (1, 1, -1), (36**5 + 1, 1, 0), (89, 1, 0, "tiny"), (1, 1, 0, "huge")]
)
def test_settings_out_of_range_are_refused(numbers):
    with pytest.raises(GeneratorSettingError):
        ShopSetting(*numbers)


def test_an_id_of_a_tiny_shop_says_its_kind_and_not_its_properties():
    shops = [list(generate_products(ShopSetting(88, 1, seed, "tiny"))) for seed in (0, 1)]
    one, other = ({product.asin: product for product in shop} for shop in shops)
    assert one.keys() == other.keys()
    assert all(re.fullmatch(r"G\d{9}", asin) for asin in one)
    assert all(one[asin].query == other[asin].query for asin in one)
    assert sum(one[asin].attributes == other[asin].attributes for asin in one) < 44


def test_goals_are_divided_among_shops_and_are_the_same_however_they_are_reached(own_cache):
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
    assert played["1"][0] == played["5"][0] != played["2"][0]
    again = pickle.loads(pickle.dumps(env))
    _, info = again.reset(options={"task": 6})
    assert (again.catalogue.folder, info["task"]) == played["6"]
    alone = WebShopEnv("generated", num_games=3, difficulty="tiny", num_shops=4)  # no shop without a goal
    assert len({alone.reset(options={"task": task})[1]["task"] for task in alone.tasks()}) == 3
    with pytest.raises(GeneratorSettingError, match="found num_shops 0"):
        WebShopEnv("generated", num_shops=0)


def test_pages_of_tiny_shops_list_four_results_and_published_ones_ten(own_cache):
    for difficulty, listed in (("tiny", 4), ("official", 10)):
        env = WebShopEnv("generated", num_games=1, difficulty=difficulty)
        env.reset(options={"task": 0})
        *_, info = env.step("search[free]")
        found = [action for action in info["admissible_actions"] if re.fullmatch(r"click\[g\w{9}\]", action)]
        assert len(found) == listed
        env.close()


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
