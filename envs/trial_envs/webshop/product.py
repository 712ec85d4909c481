"""A product, with the fields that pages, search and reward use."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from trial_envs.errors import CorruptCatalogueError
from trial_envs.text_index.records import REBUILD

DEFAULT_PRICE = 100.0
"""Price in dollars of products for which the data have no price."""
NO_ATTRIBUTES = ("DUMMY_ATTR",)
"""Attributes of products for which the data have no attributes."""

_NO_DIGIT = re.compile(r"[^\d.]")


@dataclass(frozen=True, slots=True)
class Review:
    """A customer's review."""

    title: str
    score: str
    body: str


@dataclass(frozen=True, slots=True)
class Product:
    """One product of a catalogue.

    Attributes:
        asin: Amazon's product id.
        features: the bullet points of the product's page.
        options: values by option name, in the order of the page.
        attributes: attributes that WebShop mined from the texts; goals require some of them.
        category: department, such as ``fashion``.
        query: the search query that returned the product when it was collected.
        product_category: levels of the product's category, separated by ``›``.
        price_range: one price, or the lowest and the highest, in dollars.
        title_nouns: lower-cased nouns of the title, with duplicates.
    """

    asin: str
    title: str
    description: str
    features: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]
    attributes: tuple[str, ...]
    category: str
    query: str
    product_category: str
    price_range: tuple[float, ...]
    rating: str = "N.A."
    reviews: tuple[Review, ...] = ()
    title_nouns: tuple[str, ...] = ()

    @property
    def price_tag(self) -> str:
        """The text of the price on the pages."""
        return " to ".join(f"${price}" for price in self.price_range)

    @property
    def document(self) -> str:
        """The text that is indexed for search."""
        options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in self.options.items())
        return " ".join((self.title, self.description, self.features[0], options)).lower()

    def with_nouns(self, nouns: Sequence[str]) -> Product:
        """Return a copy of the product with ``nouns`` as ``title_nouns``."""
        return replace(self, title_nouns=tuple(nouns))

    def pack(self) -> bytes:
        """Encode the product as a record of the index folder."""
        return zlib.compress(json.dumps(asdict(self), ensure_ascii=False).encode("utf-8", "surrogatepass"), 1)

    @staticmethod
    def unpack(record: bytes) -> Product:
        """Return the product that a record contains, as written by :meth:`pack`.

        Raises:
            CorruptCatalogueError: the record is damaged.
        """
        try:
            fields = json.loads(zlib.decompress(record).decode("utf-8", "surrogatepass"))
            fields["options"] = {name: tuple(values) for name, values in fields["options"].items()}
            fields["reviews"] = tuple(Review(**review) for review in fields["reviews"])
            for name in ("features", "attributes", "price_range", "title_nouns"):
                fields[name] = tuple(fields[name])
            return Product(**fields)
        except (zlib.error, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptCatalogueError(f"A product record is damaged ({error}). {REBUILD}") from error


def read_product(raw: Mapping[str, Any], attributes: Sequence[str] | None) -> Product:
    """Make a product from an entry of WebShop's file ``items_shuffle*.json``.

    Args:
        raw: the entry.
        attributes: the attributes of the product in ``items_ins_v2*.json``; ``None`` if that file has none.

    Raises:
        CorruptCatalogueError: a field is missing or has a wrong type.
    """
    try:
        raw["asin"].encode()  # Reject an ASIN with lone surrogates, because the index stores ASINs in UTF-8.
        features = raw["small_description"]
        return Product(
            asin=raw["asin"],
            title=raw["name"],
            description=raw["full_description"],
            features=tuple(features) or ("",) if isinstance(features, list) else (features,),
            options=_read_options(raw["customization_options"]),
            attributes=NO_ATTRIBUTES if attributes is None else tuple(attributes),
            category=raw["category"],
            query=raw["query"].lower().strip(),
            product_category=raw["product_category"],
            price_range=read_price(raw.get("pricing")),
            rating=raw.get("rating", "N.A."),
            reviews=tuple(Review(r["title"], str(r["score"]), r["body"]) for r in raw.get("reviews", ())),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptCatalogueError(
            f"Product {raw.get('asin')!r} cannot be read ({type(error).__name__}: {error}); expected an entry of "
            "items_shuffle.json."
        ) from error


def read_price(text: str | None) -> tuple[float, ...]:
    """Return the one or two prices in a text such as ``"$10.99 - $11.99"``; :data:`DEFAULT_PRICE` if there is no text.

    Raises:
        ValueError: the text has no price.
    """
    if not text:
        return (DEFAULT_PRICE,)
    prices = tuple(float(_NO_DIGIT.sub("", part)) for part in text.split("$")[1:])
    if not prices:
        raise ValueError(f"the price {text!r} has no $")
    return prices[:2]


def _read_options(
    raw: Mapping[str, Sequence[Mapping[str, str]] | None] | Literal[""] | None,
) -> dict[str, tuple[str, ...]]:
    if not raw:
        return {}
    return {
        name.lower(): tuple(choice["value"].strip().replace("/", " | ").lower() for choice in choices)
        for name, choices in raw.items()
        if choices is not None
    }
