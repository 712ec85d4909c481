"""The shop's pages: their texts and clickable labels."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from trial_envs.webshop.product import Product

SEPARATOR = " [SEP] "
BACK_TO_SEARCH = "Back to Search"
PREVIOUS = "< Prev"
NEXT = "Next >"
BUY = "Buy Now"
SUB_PAGES = ("Description", "Features", "Reviews")
SEARCH = "Search"
ITEM_BUTTONS = (BACK_TO_SEARCH, PREVIOUS, *SUB_PAGES, BUY)
RESERVED = frozenset(label.lower() for label in (SEARCH, *ITEM_BUTTONS))
"""Labels of buttons: a click on such a label never selects an option value, even if an option has this value."""
RESULTS_PER_PAGE = 10
"""Number of products on a results page of WebShop."""

INDEX, RESULTS, ITEM, SUB_PAGE, DONE = "index", "search_results", "item_page", "item_sub_page", "done"

_ASCII_BLANKS = " \n\t\f\r"


@dataclass(frozen=True, slots=True)
class Target:
    """Target of a click on a label: the position of a product, or the name of an option; for a button, both are ``None``."""

    product: int | None = None
    option: str | None = None


_BUTTON = Target()


@dataclass(frozen=True, slots=True)
class Page:
    """A page of the shop.

    Attributes:
        name: ``index``, ``search_results``, ``item_page``, ``item_sub_page`` or ``done``.
        text: the observation.
        targets: targets of clicks by lower-cased label, in the order of the page.
        has_search_bar: whether the page has a search bar.
    """

    name: str
    text: str
    targets: Mapping[str, Target]
    has_search_bar: bool = False

    @property
    def admissible_actions(self) -> tuple[str, ...]:
        """The actions that are possible on the page."""
        search = ("search[<your query>]",) if self.has_search_bar else ()
        return (*search, *(f"click[{label}]" for label in self.targets))


@dataclass(frozen=True, slots=True)
class Listing:
    """A product on a results page; ``position`` is its position in the catalogue."""

    position: int
    asin: str
    title: str
    price_tag: str


def index_page(instruction: str) -> Page:
    """Return the first page, with the search bar."""
    return Page(INDEX, _join(["WebShop", "Instruction:", instruction, SEARCH]), _buttons([SEARCH]), True)


def results_page(instruction: str, number: int, total: int, listings: Sequence[Listing]) -> Page:
    """Return page ``number`` of the search results, counted from 1."""
    buttons = [PREVIOUS, NEXT] if number > 1 else [NEXT]
    texts = [*_head(instruction), f"Page {number} (Total results: {total})", *buttons]
    for listing in listings:
        texts += [listing.asin, listing.title, listing.price_tag]
    targets = _buttons([BACK_TO_SEARCH, *buttons])
    targets |= {listing.asin.lower(): Target(product=listing.position) for listing in listings}
    return Page(RESULTS, _join(texts), targets)


def item_page(instruction: str, product: Product) -> Page:
    """Return the page of a product with its options."""
    texts = [*_head(instruction), PREVIOUS]
    targets = _buttons(ITEM_BUTTONS)
    for name, values in product.options.items():
        texts += [name, *values]
        targets |= dict.fromkeys(values, Target(option=name))
    texts += [product.title, f"Price: {product.price_tag}", f"Rating: {product.rating}", *SUB_PAGES, BUY]
    return Page(ITEM, _join(texts), targets)


def sub_page(instruction: str, product: Product, name: str) -> Page:
    """Return the page with the description, the features or the reviews of a product."""
    texts: list[str]
    if name == "Description":
        texts = [product.description]
    elif name == "Features":
        texts = [f" {feature}" for feature in product.features]
    else:
        texts = [text for review in product.reviews for text in (f'"{review.title}"', review.score, review.body)]
    shown = _join([*_head(instruction), PREVIOUS, *texts])
    return Page(SUB_PAGE, shown, _buttons([BACK_TO_SEARCH, PREVIOUS]))


def done_page(asin: str, options: Mapping[str, str], reward: float) -> Page:
    """Return the page after a purchase. As in WebShop's own text mode, only the ASIN, options and reward have values."""
    texts = [
        "Thank you for shopping with us!",
        "Your code:",
        "None",
        "(Paste it in your MTurk interface.)",
        "Purchased",
    ]
    texts += ["asin", asin, "options", _html_json(options)]
    for field in ("attrs", "category", "query", "product category"):
        texts += [field, "None"]
    texts += ["Target", "asin", "options", "attrs", "price upper", "instuction text", "category", "product category"]
    texts += ["query", "Goal", "None", "Reward", "Your score (min 0.0, max 1.0)", str(reward), "Reward Details", "None"]
    return Page(DONE, _join(texts), {})


def _head(instruction: str) -> list[str]:
    return ["Instruction:", instruction, BACK_TO_SEARCH]


def _buttons(labels: Iterable[str]) -> dict[str, Target]:
    return {label.lower(): _BUTTON for label in labels}


def _join(texts: Iterable[str]) -> str:
    """Join the texts of a page as WebShop does; empty texts, and white space that contains a line break, are omitted."""
    return SEPARATOR.join(text.strip() for text in texts if text and not _is_omitted(text))


def _is_omitted(text: str) -> bool:
    return "\n" in text and not text.strip(_ASCII_BLANKS)


def _html_json(options: Mapping[str, str]) -> str:
    """Return the chosen options of a product as ASCII JSON, sorted by option name and escaped for HTML."""
    text = json.dumps(dict(options), sort_keys=True)
    for character in "<>&'":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
