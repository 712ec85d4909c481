"""A session: one episode in the shop, from the first page to the purchase."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trial_envs.text_index.search import TooManyTermsError
from trial_envs.webshop import pages
from trial_envs.webshop.actions import parse_action
from trial_envs.webshop.catalogue import Catalogue
from trial_envs.webshop.goal import Goal
from trial_envs.webshop.pages import Page
from trial_envs.webshop.product import Product
from trial_envs.webshop.reward import PurchaseReward, purchase_reward

_SUB_PAGES = {name.lower(): name for name in pages.SUB_PAGES}


@dataclass(frozen=True, slots=True)
class Purchase:
    """A purchase: the product, the chosen options, and the reward."""

    asin: str
    price: float
    options: dict[str, str]
    reward: PurchaseReward


class Session:
    """The state of a session, which is one episode in the shop.

    Args:
        catalogue: the shop.
        goal: goal of the session.
        results_per_page: number of products on a results page.

    Attributes:
        page: the current page.
        purchase: the purchase that ended the session; ``None`` before a purchase.
    """

    def __init__(self, catalogue: Catalogue, goal: Goal, results_per_page: int = pages.RESULTS_PER_PAGE) -> None:
        self._catalogue = catalogue
        self._goal = goal
        self._per_page = results_per_page
        self.purchase: Purchase | None = None
        self.page = self._open_index()

    def act(self, action: str) -> bool:
        """Carry out one action; return whether it was possible. An impossible action changes nothing."""
        name, argument = parse_action(action)
        if not argument:
            return False
        if name == "search":
            return self._search(argument)
        if name == "click" and argument in self.page.targets:
            if argument != pages.SEARCH.lower():
                self.page = self._click(argument)
            return True
        return False

    def _open_index(self) -> Page:
        self._results: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._number = 1
        self._forget_product()
        return pages.index_page(self._goal.instruction)

    def _forget_product(self) -> None:
        self._product: Product | None = None
        self._position = -1
        self._options: dict[str, str] = {}

    def _search(self, query: str) -> bool:
        results = self._find(query)
        if results is None:
            return False
        self._results = results
        self.page = self._open_results(1)
        return True

    def _find(self, query: str) -> NDArray[np.int64] | None:
        """Return the results of a query; ``None`` if the query is not supported here or fails in WebShop's own code.

        ``<c> name`` lists the products of a category, ``<q> text`` the products with this ``query``. ``<r>`` (a random sample)
        is not supported because it is not repeatable, ``<a>`` (an attribute) because it fails in WebShop's own code.
        """
        words = query.split(" ")
        rest = " ".join(words[1:]).strip()
        match words[0]:
            case "<c>":
                return self._catalogue.in_category(words[1].strip()) if len(words) > 1 else None
            case "<q>":
                return self._catalogue.in_collection(rest)
            case "<r>" | "<a>":
                return None
        try:
            return self._catalogue.search(query)
        except TooManyTermsError:
            return None

    def _open_results(self, number: int) -> Page:
        self._forget_product()
        self._number = number
        shown = self._results[(number - 1) * self._per_page : number * self._per_page]
        listings = [self._catalogue.listing(position) for position in shown.tolist()]
        return pages.results_page(self._goal.instruction, number, len(self._results), listings)

    def _click(self, label: str) -> Page:
        """Return the page after a click on a label. If an option value has a button's label, the click is on the button."""
        here = self.page.name
        if label == pages.BUY.lower():
            return self._buy()
        if label == pages.BACK_TO_SEARCH.lower():
            return self._open_index()
        if label == pages.NEXT.lower() and here == pages.RESULTS:
            return self._open_results(self._number + 1)
        if label == pages.PREVIOUS.lower():
            if here == pages.SUB_PAGE:
                return self._open_item()
            return self._open_results(self._number - 1 if here == pages.RESULTS else self._number)
        if label in _SUB_PAGES and self._product is not None:
            return pages.sub_page(self._goal.instruction, self._product, _SUB_PAGES[label])
        return self._follow(label)

    def _follow(self, label: str) -> Page:
        target = self.page.targets[label]
        if target.product is not None:
            self._position, self._product = target.product, self._catalogue.product(target.product)
        elif target.option is not None:
            self._options[target.option] = label
        return self._open_item()

    def _open_item(self) -> Page:
        assert self._product is not None
        return pages.item_page(self._goal.instruction, self._product)

    def _buy(self) -> Page:
        assert self._product is not None
        product, price = self._product, self._catalogue.price(self._position)
        nouns = self._catalogue.product(self._catalogue.position(self._goal.asin)).title_nouns
        reward = purchase_reward(product, price, self._options, self._goal, nouns)
        self.purchase = Purchase(product.asin, price, dict(self._options), reward)
        return pages.done_page(product.asin, self._options, reward.reward)
