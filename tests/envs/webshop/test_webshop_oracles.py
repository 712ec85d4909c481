"""The planned purchase reaches the best reward of its product, and the explorer wins most goals."""

from text_games import play_expert
from webshop_source import PRODUCTS

from trial_envs.webshop.env import WebShopEnv
from trial_envs.webshop.explorer import ExplorerOracle, ParsedTask, read_task
from trial_envs.webshop.oracle import _reachable_values
from trial_envs.webshop.product import read_product


def test_instructions_are_read():
    for sentence, *parts in (
        ("Find me red lamps", "red lamps", {}, float("inf")),
        (
            "Find me a, b lamps with solid wood for rooms, and price lower than 60.00 dollars",
            "a, b lamps with solid wood for rooms",
            {},
            60,
        ),
        (
            "Find me shirts with long sleeve with color: a3-gray, and fit type: men, and price lower than 40.00 dollars",
            "shirts with long sleeve",
            {"color": "a3-gray", "fit type": "men"},
            40,
        ),
        ('Find me pillows with size: 28" x 28"', "pillows", {"size": '28" x 28"'}, float("inf")),
        ("i need a lamp", "i need a lamp", {}, float("inf")),
    ):
        assert read_task(sentence) == ParsedTask(*parts)


def test_the_plan_chooses_no_value_whose_label_is_a_button():
    options = {"kind": [{"value": value} for value in ("Search", "Reviews", "Next >", "Red")]}
    product = PRODUCTS[0] | {"customization_options": options}
    assert _reachable_values(read_product(product, None)) == {"kind": ["next >", "red"]}


def test_the_explorer_wins_nearly_all_generated_goals(own_cache):
    played = play_expert(WebShopEnv("generated", num_games=100), ExplorerOracle)
    assert sum(info["score"] == 1 for info, _ in played) >= 90
    assert not any(info["truncated"] for info, _ in played)
    assert sum(len(actions) for _, actions in played) / 100 < 9
