"""Sessions and rewards are those of the recordings; rules of the reward that the recordings do not cover."""

from recordings import webshop_records

from trial_envs.webshop.catalogue import open_catalogue
from trial_envs.webshop.reward import count_options, plain_colour, purchase_reward, texts_match, type_reward
from trial_envs.webshop.session import Session


def test_episodes_are_repeated_step_by_step(origin, shop_folder):
    shop, episodes = open_catalogue(shop_folder), webshop_records("episodes", origin)
    for episode in episodes:
        goal = shop.goal(episode["goal_index"])
        assert goal.asin == episode["goal_asin"]
        assert goal.instruction == episode["instruction_text"]
        session = Session(shop, goal)
        for step in episode["steps"]:
            where = (episode["id"], step["action"])
            if step["action"] is not None:
                session.act(step["action"])
                bought = session.purchase
                told = (bought.reward.reward if bought else 0, bought is not None)
                assert told == (step["reward"], step["done"]), where
            page = session.page
            assert (page.text, page.name) == (step["observation"], step["page"]), where
            offered = {"has_search_bar": page.has_search_bar, "clickables": list(page.targets)}
            assert offered == step["available_actions"], where
        purchase, recorded = session.purchase, episode["purchase"]
        assert (purchase is None) == (recorded is None)
        if recorded is not None:
            assert purchase.asin == recorded["purchased_asin"]
            assert purchase.price == recorded["price"]
            assert [*purchase.options.items()] == [*recorded["options"].items()]
            assert purchase.reward.reward == recorded["reward"]
            assert purchase.reward.parts() == recorded["reward_info"]
    assert len(episodes) == {"own": 36, "published": 120}[origin]


def test_rewards_and_their_parts_are_repeated(origin, shop_folder):
    shop = open_catalogue(shop_folder)
    for record in webshop_records("rewards", origin):
        goal = shop.goal(record["goal_index"])
        product = shop.product(shop.position(record["purchased_asin"]))
        nouns = shop.product(shop.position(goal.asin)).title_nouns
        reward = purchase_reward(product, record["price"], record["options"], goal, nouns)
        assert (reward.reward, reward.parts()) == (record["reward"], record["reward_info"]), record["id"]


def test_texts_match_above_85():
    for one, other, match in (
        ("abcdefghijklmnopqrst", "abcdefghijklmnopq123", False),  # 85 exactly
        ("abcdefghijklmnopqrst", "abcdefghijklmnopqr12", True),  # 90
        ("long sleeve", "sleeve long", True),
        ("long sleeve", "long sleeve shirt", True),
        ("Long-Sleeve", "long sleeve", True),
        ("café", "caf", True),  # Latin-1 letters outside ASCII are dropped
        ("", "long sleeve", False),
        ("", "", False),
        ("&", "&", False),
    ):
        assert texts_match(one, other) is match


def test_the_kind_counts_by_collection_category_and_title():
    for title_score, expected in {1.0: 1.0, 0.1: 1.0, 0.09: 0.1, 0.0: 0.0}.items():
        assert type_reward(True, title_score) == expected
    assert type_reward(False, 0.2) == 0.5
    assert type_reward(False, 0.21) == 1.0


def test_the_first_colour_of_the_list_represents_a_text():
    assert plain_colour("navy blue") == "blue"
    assert plain_colour("distant") == "tan"
    assert plain_colour("small") == "small"


def test_a_value_may_match_several_targets_and_each_counts_once():
    assert count_options(["medium", "medium"], [("size", "medium"), ("fit", "medium")]) == 2
    assert count_options([], [("size", "medium")]) == 0
