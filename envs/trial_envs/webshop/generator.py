"""Generated shops: products with options, prices and reviews, and goals that can all be reached with a reward of 1.

A shop is a pure function of its :class:`ShopSetting`, so every process generates the same shop.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from trial_envs.core.cache import cache_folder
from trial_envs.core.levels import level_named, require_whole
from trial_envs.errors import GeneratorSettingError
from trial_envs.text_index.folder import MANIFEST, content_key
from trial_envs.webshop.assortment import (
    BRAND_ENDS,
    BRAND_STARTS,
    KINDS,
    PRAISE,
    STYLES,
    USES,
    VERDICTS,
    Kind,
)
from trial_envs.webshop.catalogue import Catalogue, open_catalogue
from trial_envs.webshop.difficulty import LEVELS
from trial_envs.webshop.goal import NO_LIMIT, Goal, Wish, draw_limit, draw_prices, make_goal
from trial_envs.webshop.index_writer import write_index
from trial_envs.webshop.product import Product, Review

VERSION = 1
"""Version of the generator; increase it whenever a change makes the same :class:`ShopSetting` generate another shop."""

_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True, slots=True)
class ShopSetting:
    """The parameters of a generated shop.

    Attributes:
        num_products: number of products, 1 to the level's maximum.
        num_goals: number of goals, at least 1; they cycle through the products.
        seed: seed of the generator, at least 0.
        difficulty: name of a difficulty level.

    Raises:
        GeneratorSettingError: a number is out of range, or no level has this name.
    """

    num_products: int = 200
    num_goals: int = 256
    seed: int = 0
    difficulty: str = "official"

    def __post_init__(self) -> None:
        max_products = level_named(LEVELS, self.difficulty).max_products
        require_whole(0, seed=self.seed)
        require_whole(1, num_products=self.num_products, num_goals=self.num_goals)
        # Convert NumPy integers: the cache key is a digest of JSON, which cannot represent them.
        for name in ("num_products", "num_goals", "seed"):
            object.__setattr__(self, name, int(getattr(self, name)))
        if self.num_products > max_products:
            raise GeneratorSettingError(
                f"Expected 1 to {max_products} products at the level {self.difficulty}, got {self.num_products}."
            )


def open_generated(setting: ShopSetting) -> Catalogue:
    """Open the shop of a setting; it is generated on first use and stored in the cache."""
    origin = {"generator": VERSION, **asdict(setting)}
    folder = cache_folder() / f"webshop-generated-{content_key(origin)}"
    if not (folder / MANIFEST).is_file():
        products = list(generate_products(setting))
        prices = draw_prices(products, random.Random(f"prices {setting.seed}"))
        write_index(folder, products, prices, generate_goals(setting, products, prices), origin)
    return open_catalogue(folder)


def generate_products(setting: ShopSetting) -> Iterator[Product]:
    """Yield the products of a shop; their kinds alternate."""
    level = level_named(LEVELS, setting.difficulty)
    for number in range(setting.num_products):
        rng, kind = random.Random(f"product {setting.seed} {number}"), KINDS[number % len(KINDS)]
        make = _make_concise if level.concise else _make_product
        yield make(kind, number, rng)


def generate_goals(setting: ShopSetting, products: list[Product], prices: list[float]) -> Iterator[Goal]:
    """Yield the goals of a shop: one goal per product in shuffled order, then again in the same order, and so on."""
    level = level_named(LEVELS, setting.difficulty)
    order = list(range(len(products)))
    random.Random(f"order {setting.seed}").shuffle(order)
    for number in range(setting.num_goals):
        position = order[number % len(order)]
        rng = random.Random(f"goal {setting.seed} {number}")
        product = products[position]
        wish = Wish(product, *_word_wish(product, rng))
        wanted = {name: rng.choice(product.options[name]) for name in sorted(product.options)}
        yield make_goal(wish, wanted, NO_LIMIT if level.concise else draw_limit(prices[position], rng))


def _make_concise(kind: Kind, number: int, rng: random.Random) -> Product:
    """Return a product with short texts for tiny models; its id contains the number of its kind."""
    attribute = rng.choice(kind.attributes)
    noun, name = kind.noun.lower(), next(iter(kind.options))
    values = rng.sample(kind.options[name], rng.randint(2, min(3, len(kind.options[name]))))
    return Product(
        asin=f"G{number % len(KINDS):06d}{number // len(KINDS):03d}",
        title=f"{noun}, {attribute}",
        description=f"A {noun}.",
        features=(attribute,),
        options={name: tuple(value for value in kind.options[name] if value in values)},
        attributes=(attribute,),
        category=kind.category,
        query=kind.query,
        product_category=" › ".join(kind.path),
        price_range=(float(round(rng.uniform(*kind.prices))),),
        rating=f"{rng.randint(2, 5)} stars",
        title_nouns=tuple(noun.split()),
    )


def _make_product(kind: Kind, number: int, rng: random.Random) -> Product:
    brand = rng.choice(BRAND_STARTS) + rng.choice(BRAND_ENDS)
    model = f"{rng.choice(_DIGITS[10:])}{rng.choice(_DIGITS[10:])}{rng.randrange(100, 1000)}"
    attributes = tuple(rng.sample(kind.attributes, rng.randint(2, 4)))
    shown, *hidden = attributes
    title = f"{brand} {rng.choice(STYLES)} {kind.noun} {model}, {shown.title()}, {rng.choice(USES).title()}"
    options = {name: _choose_values(values, rng) for name, values in kind.options.items()}
    return Product(
        asin=_asin(number, rng),
        title=title,
        description=_describe(brand, kind, attributes, rng),
        features=tuple(f"{text.capitalize()}: {rng.choice(PRAISE)}" for text in (shown, *hidden)),
        options=options,
        attributes=attributes,
        category=kind.category,
        query=kind.query,
        product_category=" › ".join(kind.path),
        price_range=_draw_range(kind, rng),
        rating=f"{rng.randint(20, 50) / 10} out of 5 stars",
        reviews=tuple(Review(*verdict) for verdict in rng.sample(VERDICTS, rng.randint(0, 3))),
        title_nouns=(brand.lower(), *kind.noun.lower().split(), model.lower()),
    )


def _choose_values(values: tuple[str, ...], rng: random.Random) -> tuple[str, ...]:
    """Return a random choice of at least two of the values, in their order."""
    chosen = set(rng.sample(values, rng.randint(2, len(values))))
    return tuple(value for value in values if value in chosen)


def _describe(brand: str, kind: Kind, attributes: tuple[str, ...], rng: random.Random) -> str:
    noun = kind.noun.lower()
    return (
        f"The {noun} by {brand} is {rng.choice(PRAISE)}. "
        f"It is {', '.join(attributes[:-1])} and {attributes[-1]}, {rng.choice(USES)}. "
        f"Choose among {' and '.join(kind.options)}."
    )


def _draw_range(kind: Kind, rng: random.Random) -> tuple[float, ...]:
    """Draw a product's price or, for one product in three, its lowest and highest price."""
    low, high = kind.prices
    price = round(rng.uniform(low, high), 2)
    return (price,) if rng.random() < 2 / 3 else (price, round(price * rng.uniform(1.1, 1.5), 2))


def _word_wish(product: Product, rng: random.Random) -> tuple[str, tuple[str, ...]]:
    wanted = tuple(rng.sample(product.attributes, rng.randint(1, min(3, len(product.attributes)))))
    return f"Find me {', '.join(wanted)} {product.query}", wanted


def _asin(number: int, rng: random.Random) -> str:
    """Return a product id of ten characters: the letter G, four random characters, and the product's number in base 36."""
    counted = ""
    for _ in range(5):
        number, digit = divmod(number, 36)
        counted = _DIGITS[digit] + counted
    return "G" + "".join(rng.choice(_DIGITS) for _ in range(4)) + counted
