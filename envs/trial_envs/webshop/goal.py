"""Goals: the product, attributes, options and price limit of a task. They are read from a file, or built with a seed."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from trial_envs.errors import CorruptCatalogueError
from trial_envs.text_index.records import REBUILD
from trial_envs.webshop.product import Product

NO_LIMIT = 1_000_000.0
"""Value of ``price_upper`` for goals without a price limit."""
ORDER_SEED = 233
"""Seed with which WebShop's own code shuffles the goals."""

_PRICE_LIMITS = tuple(10.0 * step for step in range(1, 100))


@dataclass(frozen=True, slots=True)
class Goal:
    """A task: an instruction, with the product, attributes, options and price limit that it is about.

    Attributes:
        asin: ASIN (Amazon's id) of the product for which the goal was written.
        name: title of this product.
        attributes: attributes that the instruction requires, at least one.
        price_upper: price limit in dollars; :data:`NO_LIMIT` if there is none.
        wanted: option values by option name; a tuple of the values without names if the instruction was written by a person.
        weight: relative frequency with which WebShop's own code draws the goal.
    """

    asin: str
    category: str
    query: str
    name: str
    product_category: str
    instruction: str
    attributes: tuple[str, ...]
    price_upper: float
    wanted: Mapping[str, str] | tuple[str, ...]
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.attributes:
            raise ValueError("it has no attributes, and the reward divides by their number")

    @property
    def option_targets(self) -> tuple[tuple[str, str] | str, ...]:
        """The wanted options as (name, value) pairs; only the values if the instruction was written by a person."""
        return tuple(self.wanted.items()) if isinstance(self.wanted, Mapping) else tuple(self.wanted)

    def pack(self) -> bytes:
        """Encode the goal as a record of the index folder."""
        return json.dumps(asdict(self), ensure_ascii=False).encode("utf-8", "surrogatepass")

    @staticmethod
    def unpack(record: bytes) -> Goal:
        """Return the goal that a record contains, as written by :meth:`pack`.

        Raises:
            CorruptCatalogueError: the record is damaged.
        """
        try:
            fields = json.loads(record.decode("utf-8", "surrogatepass"))
            fields["attributes"] = tuple(fields["attributes"])
            if isinstance(fields["wanted"], list):
                fields["wanted"] = tuple(fields["wanted"])
            return Goal(**fields)
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptCatalogueError(f"A goal record is damaged ({error}). {REBUILD}") from error


def read_goal(raw: Mapping[str, Any]) -> Goal:
    """Make a goal from a parsed line of WebShop's file ``goals.jsonl``.

    Raises:
        CorruptCatalogueError: a field is missing.
    """
    try:
        wanted = raw["goal_options"]
        return Goal(
            asin=raw["asin"],
            category=raw["category"],
            query=raw["query"],
            name=raw["name"],
            product_category=raw["product_category"],
            instruction=raw["instruction_text"],
            attributes=tuple(raw["attributes"]),
            price_upper=float(raw["price_upper"]),
            wanted=dict(wanted) if isinstance(wanted, dict) else tuple(wanted),
            weight=float(raw.get("weight", 1.0)),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptCatalogueError(
            f"A goal cannot be read ({type(error).__name__}: {error}); expected a line of goals.jsonl."
        ) from error


@dataclass(frozen=True, slots=True)
class Wish:
    """An instruction with its product and the attributes that it requires; a goal adds wanted options and a price limit."""

    product: Product
    instruction: str
    attributes: tuple[str, ...]
    options: tuple[str, ...] | None = None
    """Option values if a person wrote the instruction; if ``None``, every combination of the product's options gives a goal."""


def draw_prices(products: Iterable[Product], rng: random.Random) -> list[float]:
    """Return the price of every product; it is drawn uniformly if the product has a range of prices."""
    return [p.price_range[0] if len(p.price_range) == 1 else rng.uniform(*p.price_range) for p in products]


def build_goals(wishes: Iterable[tuple[Wish, float]], rng: random.Random) -> list[Goal]:
    """Build goals from instructions, in the order of WebShop's own code.

    Args:
        wishes: the instructions, each with the price of its product.
        rng: random generator that draws the price limits. If it was seeded with 233 and then drew the products' prices, the goals
            built from WebShop's 1,000-product set equal the goals in the set's file ``goals.jsonl``.
    """
    goals: list[Goal] = []
    for wish, price in wishes:
        if wish.attributes:
            limit = draw_limit(price, rng)
            choices = _combinations(wish.product) if wish.options is None else (wish.options,)
            goals += [make_goal(wish, wanted, limit) for wanted in choices]
    counts = Counter(attribute for goal in goals for attribute in goal.attributes)
    goals = [g if isinstance(g.wanted, tuple) else replace(g, weight=_weight(g.attributes, counts)) for g in goals]
    random.Random(ORDER_SEED).shuffle(goals)
    return goals


def draw_limit(price: float, rng: random.Random) -> float:
    """Draw two of the four lowest multiples of 10 dollars above ``price``, up to 990 dollars, and return the larger one.

    If there are fewer than two such multiples, return ``NO_LIMIT``.
    """
    limits = [limit for limit in _PRICE_LIMITS if limit > price][:4]
    return max(rng.sample(limits, 2)) if len(limits) >= 2 else NO_LIMIT


def make_goal(wish: Wish, wanted: Mapping[str, str] | tuple[str, ...], limit: float) -> Goal:
    """Make a goal from an instruction, wanted options and a price limit, worded as in WebShop."""
    product = wish.product
    pairs = wanted.items() if isinstance(wanted, Mapping) else ()
    options = ", and ".join(f"{name}: {value}" for name, value in pairs)
    price = "" if limit == NO_LIMIT else f", and price lower than {limit:.2f} dollars"
    return Goal(
        asin=product.asin,
        category=product.category,
        query=product.query,
        name=product.title,
        product_category=product.product_category,
        instruction=f"{wish.instruction}{' with ' if options else ''}{options}{price}",
        attributes=wish.attributes,
        price_upper=limit,
        wanted=wanted,
    )


def _combinations(product: Product) -> Iterable[dict[str, str]]:
    names = sorted(product.options)
    for values in itertools.product(*(product.options[name] for name in names)):
        yield dict(zip(names, values, strict=True))


def _weight(attributes: Sequence[str], counts: Counter[str]) -> float:
    return sum(1.0 / counts[attribute] for attribute in attributes) / len(attributes)
