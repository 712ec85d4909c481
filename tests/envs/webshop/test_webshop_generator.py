"""Generated shops: repeatable, varied, and every goal can be reached."""

import pytest

from trial_envs.errors import GeneratorSettingError
from trial_envs.webshop.assortment import KINDS
from trial_envs.webshop.env import WebShopEnv
from trial_envs.webshop.generator import ShopSetting, generate_products, open_generated
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


@pytest.mark.parametrize(("seed", "products"), [(0, 40), (1, 200), (2, 3)])
def test_every_goal_is_won_by_its_walkthrough_within_the_turns(own_cache, seed, products):
    env = WebShopEnv("generated", num_products=products, num_games=120, generator_seed=seed)
    for task in env.tasks():
        env.reset(options={"task": task})
        for action in env.walkthrough:
            _, _, terminated, truncated, info = env.step(action)
        assert info["won"], (task, info["task"])
        assert terminated
        assert not truncated
    env.close()


def test_the_cached_shop_is_used_again(own_cache):
    setting = ShopSetting(5, 5, 9)
    first = open_generated(setting).folder
    made = (first / "manifest.json").stat().st_mtime_ns
    assert open_generated(setting).folder == first
    assert (first / "manifest.json").stat().st_mtime_ns == made


def test_reviews_are_shown(own_cache):
    env = WebShopEnv("generated", num_products=30, num_games=1)
    shop = env.catalogue
    product = next(shop.product(n) for n in range(30) if shop.product(n).reviews)
    env.reset(options={"task": 0})
    for action in (f"search[{product.title}]", f"click[{product.asin.lower()}]", "click[reviews]"):
        observation, *_ = env.step(action)
    review = product.reviews[0]
    assert f'"{review.title}" [SEP] {review.score} [SEP] {review.body}' in observation


@pytest.mark.parametrize("numbers", [(0, 1, 0), (1, 0, 0), (1, 1, -1), (36**5 + 1, 1, 0)])
def test_settings_out_of_range_are_refused(numbers):
    with pytest.raises(GeneratorSettingError):
        ShopSetting(*numbers)
