"""Writes the recordings in ``tests/data``, from generated games and a generated shop alone (about a minute).

    python tests/support/make_recordings.py

ALFWorld's answers are those of the stock engine of the package ``alfworld``, so they check this project's engine.
WebShop's are those of this project's own engine: they show what a change of the code changes. The same command gives
the same bytes again.
"""

import json
import lzma
import os
import random
import tempfile

from recordings import OWN, OWN_SHOP

from trial_envs.alfworld.families import FAMILIES
from trial_envs.alfworld.generator import generate, task_ids
from trial_envs.webshop.generator import open_generated
from trial_envs.webshop.oracle import plan_purchase
from trial_envs.webshop.reward import purchase_reward
from trial_envs.webshop.session import Session

GAMES = (*task_ids("official", 5, 6, FAMILIES), *task_ids("medium", 5, 6, FAMILIES))
MIXED_STEPS = 20
ODD_COMMANDS = ("sing a song", "", "GO TO SHELF 1", "look around", "go to shelf 99", "help me", " inventory ")
EPISODES_A_KIND = 12
MALFORMED = ("buy now", "search[]", "click[no such label]", "Search[lamp]", "click[x [y]]", "search[tea] and more")
WORDS = ("black", "large", "garden", "tea", "women", "lamp", "slim", "fit", "pack", "of", "2", "gluten", "free")
SPECIAL = ("search[<c> garden]", "search[<q> bookcases]")


def write_recordings():
    """Write all four files."""
    shop = open_generated(OWN_SHOP)
    files = {
        "alfworld_episodes": (row for task_id in GAMES for row in alfworld_rows(generate(task_id))),
        "webshop_episodes": webshop_rows(shop),
        "webshop_rewards": reward_rows(shop),
        "webshop_search": search_rows(shop),
    }
    for name, rows in files.items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (OWN / f"{name}.jsonl.xz").write_bytes(lzma.compress(text.encode(), preset=9))


def alfworld_rows(game):
    """A game's walkthrough, and a walk that mixes its steps with random, informative and odd commands."""
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
    from textworld.core import EnvInfos
    from textworld.envs.pddl import PddlEnv

    engine = AlfredDemangler(PddlEnv(EnvInfos(won=True, admissible_commands=True)), shuffle=False)
    engine.load({"pddl_domain": game.text.domain, "pddl_problem": game.text.problem, "grammar": game.text.grammar})
    name, trial = game.task_id.split("/")
    for mode in ("walkthrough", "mixed"):
        steps = _alfworld_steps(engine, game, mode)
        row = {"id": f"{mode}/{game.task_id}", "mode": mode, "split": "generated", "name": name, "trial": trial}
        row |= {"family": game.family, "walkthrough": game.walkthrough, "won": steps[-1]["won"], "steps": steps}
        yield row
    engine.close()


def _alfworld_steps(engine, game, mode):
    rng = random.Random(f"{mode} {game.task_id}")
    remaining = list(game.walkthrough)
    state, done = engine.reset(), False
    steps = [_alfworld_step(None, state, done)]
    while not done and len(steps) <= MIXED_STEPS:
        if mode == "walkthrough" or (remaining and rng.random() < 0.4):
            command = remaining.pop(0)
        else:
            command = rng.choice(
                [rng.choice(state.admissible_commands), rng.choice(["look", "inventory"]), rng.choice(ODD_COMMANDS)]
            )
        state, _, done = engine.step(command)
        steps.append(_alfworld_step(command, state, done))
    return steps


def _alfworld_step(action, state, done):
    return {
        "action": action,
        "observation": state.feedback,
        "admissible_commands": list(state.admissible_commands),
        "score": int(state.won),
        "done": done,
        "won": bool(state.won),
    }


def webshop_rows(shop):
    """Visits of three kinds: the best purchase, one that is partly or wholly wrong, and random walks."""
    numbers = random.Random("goals").sample(range(shop.num_goals), 3 * EPISODES_A_KIND)
    for place, number in enumerate(numbers):
        kind = ("oracle", "partial", "random")[place % 3]
        goal = shop.goal(number)
        row = {"id": f"{kind}/{number}", "kind": kind, "goal_index": number, "goal_asin": goal.asin}
        yield row | {"instruction_text": goal.instruction} | _visit(shop, goal, kind, random.Random(f"visit {number}"))


def _visit(shop, goal, kind, rng):
    session = Session(shop, goal)
    steps = [_webshop_step(None, session)]
    planned = list(plan_purchase(shop, goal))
    if kind == "partial":
        planned = _spoil(planned, rng)
    for number in range(15):
        action = _random_action(session, rng) if kind == "random" else planned[number]
        session.act(action)
        steps.append(_webshop_step(action, session))
        if session.purchase:
            break
    purchase = session.purchase
    return {
        "steps": steps,
        "purchase": purchase
        and {
            "purchased_asin": purchase.asin,
            "price": purchase.price,
            "options": purchase.options,
            "reward": purchase.reward.reward,
            "reward_info": purchase.reward.parts(),
        },
    }


def _spoil(planned, rng):
    """The plan without one option, with a look at a page before it; half the time from another search."""
    spoilt = [*planned[:-2], "click[features]", "click[< prev]", planned[-1]]
    return spoilt if rng.random() < 0.5 else ["search[small lamp]", "click[next >]", "click[< prev]", *spoilt]


def _random_action(session, rng):
    labels = [label for label in session.page.targets if label != "buy now"]
    clicks = [f"click[{rng.choice(labels)}]"] * 6 if labels else []
    words = rng.sample(WORDS, 2)
    search = rng.choice([f"search[{' '.join(words)}]", rng.choice(SPECIAL)])
    return rng.choice([*clicks, search, rng.choice(MALFORMED), "click[buy now]"])


def _webshop_step(action, session):
    page, purchase = session.page, session.purchase
    return {
        "action": action,
        "observation": page.text,
        "available_actions": {"has_search_bar": page.has_search_bar, "clickables": list(page.targets)},
        "page": page.name,
        "reward": None if action is None else purchase.reward.reward if purchase else 0,
        "done": None if action is None else purchase is not None,
    }


def reward_rows(shop):
    """Purchases of the wanted and of other products, with wanted and other options, below and above the limit."""
    rng = random.Random("rewards")
    for number in rng.sample(range(shop.num_goals), 60):
        goal = shop.goal(number)
        wanted = shop.product(shop.position(goal.asin))
        same = shop.product(rng.choice(shop.in_category(goal.category)))
        product = rng.choice([wanted, wanted, same, shop.product(rng.randrange(shop.num_products))])
        price = rng.choice([shop.price(shop.position(product.asin)), goal.price_upper + 1])
        options = _choose_options(product, goal, rng)
        found = purchase_reward(product, price, options, goal, wanted.title_nouns)
        row = {"id": f"reward/{number}", "goal_index": number, "purchased_asin": product.asin, "price": price}
        yield row | {"options": options, "reward": found.reward, "reward_info": found.parts()}


def _choose_options(product, goal, rng):
    chosen = {name: rng.choice(values) for name, values in product.options.items() if rng.random() < 0.8}
    return dict(goal.wanted) if product.asin == goal.asin and rng.random() < 0.4 else chosen


def search_rows(shop):
    """Instructions, titles, and words that many or no products have."""
    rng = random.Random("search")
    queries = [shop.goal(rng.randrange(shop.num_goals)).instruction for _ in range(20)]
    queries += [shop.product(rng.randrange(shop.num_products)).title for _ in range(10)]
    queries += ["color", "men's shirts", "tea tea tea coffee", "the and of", "zebra", "2-tier 4.5 pack of 12"]
    for number, query in enumerate(queries):
        asins = [shop.listing(position).asin for position in shop.search(query).tolist()]
        yield {"id": f"search/{number}", "query": query, "asins": asins}


def main():
    with tempfile.TemporaryDirectory() as folder:
        # Importing alfworld makes a folder for its data, and a generated shop is kept in the cache.
        os.environ |= {"ALFWORLD_DATA": folder, "XDG_CACHE_HOME": folder}
        write_recordings()


if __name__ == "__main__":
    main()
