"""Sessions and rewards against everything that was recorded: of this engine, and of the published one."""

import pytest
from recordings import webshop_records

from trial_envs.webshop.catalogue import open_catalogue
from trial_envs.webshop.reward import purchase_reward
from trial_envs.webshop.session import Session


@pytest.mark.parametrize("kind", ["oracle", "partial", "random"])
def test_episodes_are_repeated_step_by_step(origin, shop_folder, kind):
    shop = open_catalogue(shop_folder)
    episodes = [episode for episode in webshop_records("episodes", origin) if episode["kind"] == kind]
    for episode in episodes:
        goal = shop.goal(episode["goal_index"])
        assert (goal.asin, goal.instruction) == (episode["goal_asin"], episode["instruction_text"])
        session = Session(shop, goal)
        for number, step in enumerate(episode["steps"]):
            where = (episode["id"], number, step["action"])
            if step["action"] is not None:
                session.act(step["action"])
            page, purchase = session.page, session.purchase
            assert page.text == step["observation"], where
            assert page.name == step["page"], where
            offered = {"has_search_bar": page.has_search_bar, "clickables": list(page.targets)}
            assert offered == step["available_actions"], where
            if step["action"] is not None:
                assert (purchase.reward.reward if purchase else 0) == step["reward"], where
                assert (purchase is not None) == step["done"], where
        check_purchase(session.purchase, episode["purchase"])
    assert len(episodes) == {"own": 12, "published": 40}[origin]


def check_purchase(purchase, recorded):
    if recorded is None:
        assert purchase is None
        return
    assert (purchase.asin, purchase.price) == (recorded["purchased_asin"], recorded["price"])
    assert list(purchase.options.items()) == list(recorded["options"].items())
    assert purchase.reward.reward == recorded["reward"]
    assert purchase.reward.parts() == recorded["reward_info"]


def test_rewards_and_their_parts_are_repeated(origin, shop_folder):
    shop = open_catalogue(shop_folder)
    for record in webshop_records("rewards", origin):
        goal = shop.goal(record["goal_index"])
        product = shop.product(shop.position(record["purchased_asin"]))
        nouns = shop.product(shop.position(goal.asin)).title_nouns
        found = purchase_reward(product, record["price"], record["options"], goal, nouns)
        assert (found.reward, found.parts()) == (record["reward"], record["reward_info"]), record["id"]
