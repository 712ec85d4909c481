"""The best purchase for a goal, planned with knowledge of the goal and the whole catalogue."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from trial_envs.webshop import pages
from trial_envs.webshop.actions import parse_action
from trial_envs.webshop.catalogue import Catalogue
from trial_envs.webshop.goal import Goal
from trial_envs.webshop.product import Product
from trial_envs.webshop.reward import option_matches


def plan_purchase(catalogue: Catalogue, goal: Goal, results_per_page: int = pages.RESULTS_PER_PAGE) -> tuple[str, ...]:
    """Return actions that, from the first page, buy the goal's product with the highest possible reward, 1.0 if reachable."""
    position = catalogue.position(goal.asin)
    product = catalogue.product(position)
    search, number = _find_search(catalogue, goal, product, position, results_per_page)
    turn_pages = ("click[next >]",) * ((number - 1) // results_per_page)
    options = best_options(product, goal)
    clicks = [f"click[{value}]" for value in options.values()]
    return (search, *turn_pages, f"click[{goal.asin.lower()}]", *clicks, "click[buy now]")


def _find_search(
    catalogue: Catalogue, goal: Goal, product: Product, position: int, results_per_page: int
) -> tuple[str, int]:
    """Return a search action that lists the product, and the product's rank in the results, from 1.

    The action is the first one with the product on the first page of the results, else the one with the best rank.
    """
    best = ("", 1 << 30)
    for query in _queries(goal, product):
        positions = catalogue.search(query).tolist()
        if position in positions and positions.index(position) + 1 < best[1]:
            best = (f"search[{query}]", positions.index(position) + 1)
        if best[1] <= results_per_page:
            return best
    listed = catalogue.in_collection(product.query).tolist()
    if listed.index(position) + 1 < best[1]:
        best = (f"search[<q> {product.query}]", listed.index(position) + 1)
    return best


def _queries(goal: Goal, product: Product) -> Iterator[str]:
    for text in (product.title, goal.instruction, product.document):
        query = " ".join(re.sub(r"[\[\]]", " ", text).split()[:200]).lower()
        if query and query.split(" ", 1)[0] not in ("<c>", "<q>", "<r>", "<a>"):
            yield query


def best_options(product: Product, goal: Goal) -> dict[str, str]:
    """Return the option values to choose, by option name.

    The result has the values in ``goal.wanted`` if they fulfil all wanted options, else values that fulfil as many wanted
    options as possible. If two options have a value with the same label, a click on the label sets the later option.
    """
    targets = goal.option_targets
    reachable = _reachable_values(product)
    wanted = goal.wanted if isinstance(goal.wanted, Mapping) else {}
    direct = {name: value for name, value in wanted.items() if value in reachable.get(name, ())}
    if _fulfilled(direct.values(), targets) == (1 << len(targets)) - 1:
        return direct
    choices = []
    for name, values in reachable.items():
        by_effect: dict[int, str] = {}
        for value in (*([direct[name]] if name in direct else ()), *values):
            by_effect.setdefault(_fulfilled([value], targets), value)
        choices.append([(name, value, effect) for effect, value in by_effect.items()])
    best, max_fulfilled = direct, _fulfilled(direct.values(), targets).bit_count()
    for combination in itertools.product(*choices):
        effect = 0
        for _, _, part in combination:
            effect |= part
        if effect.bit_count() > max_fulfilled:
            best, max_fulfilled = {name: value for name, value, _ in combination}, effect.bit_count()
    return best


def _reachable_values(product: Product) -> dict[str, list[str]]:
    """Return by option name the values that can be selected by a click on their label."""
    owners = {value: name for name, values in product.options.items() for value in values}
    reachable: dict[str, list[str]] = {}
    for value, name in owners.items():
        if value not in pages.RESERVED and parse_action(f"click[{value}]") == ("click", value):
            reachable.setdefault(name, []).append(value)
    return reachable


def _fulfilled(values: Collection[str], targets: Sequence[tuple[str, str] | str]) -> int:
    """Return a bit mask of the wanted options (``targets``) that at least one of the values matches."""
    return sum(1 << i for i, target in enumerate(targets) if any(option_matches(value, target) for value in values))
