"""A scripted policy for WebShop, which uses only the instruction, the pages so far and the admissible actions."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from trial_envs.text_index.analyser import index_terms
from trial_envs.webshop import pages

_PRICE = re.compile(r", and price lower than (\d+\.\d\d) dollars$")
_OPTIONS = re.compile(r" with (?=(?:(?! with )[^:,]){1,40}: )")
_LOWEST_PRICE = re.compile(r"\$(\d+(?:\.\d+)?)")


@dataclass(frozen=True, slots=True)
class ParsedTask:
    """The parts of an instruction.

    Attributes:
        product: the description of the product and its attributes.
        options: required values by option name.
        limit: maximum price in dollars; infinite if the instruction has no limit.
    """

    product: str
    options: dict[str, str]
    limit: float

    @property
    def terms(self) -> frozenset[str]:
        """The index terms of the product's description."""
        return frozenset(index_terms(self.product.lower()))


def read_task(sentence: str) -> ParsedTask:
    """Parse an instruction of the shop; any other sentence is parsed as the description of a product."""
    text = sentence.strip()
    price = _PRICE.search(text)
    if price:
        text = text[: price.start()]
    product, *rest = _OPTIONS.split(text, maxsplit=1)
    pairs = (part.partition(": ") for part in rest[0].split(", and ")) if rest else ()
    options = {name: value for name, separator, value in pairs if separator}
    return ParsedTask(product.removeprefix("Find me "), options, float(price.group(1)) if price else float("inf"))


@dataclass(slots=True)
class _Visited:
    """A product that the policy has opened: the index terms of its pages seen so far, and the labels on its main page."""

    terms: set[str] = field(default_factory=set)
    labels: frozenset[str] = frozenset()
    read: bool = False
    """Whether one of the product's sub-pages, such as its features, was opened."""


class ExplorerOracle:
    """Searches for the product, opens affordable results in turn, and reads their features if the main page lacks required terms.

    The policy buys the first product that fulfils the instruction. Near the turn limit, or if no affordable result is left to
    visit, it buys the best product visited so far.
    """

    def reset(self, task: str, observation: str, seed: int, max_turns: int = 15) -> None:
        """Start an episode; ``task`` is the environment's ``info["task"]``."""
        self._task = read_task(task)
        self._random = random.Random(seed)
        self._left = max_turns
        self._last = ""
        self._current = ""
        self._clicked: set[str] = set()
        self._listed: frozenset[str] = frozenset()
        self._visited: dict[str, _Visited] = {}
        self._settled = False

    def act(self, observation: str, admissible: Sequence[str]) -> str:
        """Return the next action."""
        self._update(observation, admissible)
        self._last = self._choose(observation, admissible)
        self._left -= 1
        return self._last

    def carried_out(self, action: str) -> None:
        """Record that ``action`` was carried out instead of the action returned by :meth:`act`."""
        self._last = action

    def _update(self, observation: str, admissible: Sequence[str]) -> None:
        """Record which product the page shows, the terms and labels of the page, and the options chosen so far."""
        label = self._last.removeprefix("click[").removesuffix("]")
        if "click[buy now]" not in admissible:
            if _is_sub_page(admissible) and self._current:
                self._read_page(observation).read = True
            return
        if label not in self._clicked and label in self._listed:
            self._current, self._clicked = label, set()
        elif f"click[{label}]" in admissible:
            self._clicked.add(label)
        labels = frozenset(action.removeprefix("click[").removesuffix("]") for action in admissible)
        self._read_page(observation).labels = labels

    def _read_page(self, observation: str) -> _Visited:
        """Record the index terms of a page of the current product, without the instruction at the top of the page."""
        visited = self._visited.setdefault(self._current, _Visited())
        visited.terms |= set(index_terms(observation.split(pages.PREVIOUS, 1)[-1].lower()))
        return visited

    def _choose(self, observation: str, admissible: Sequence[str]) -> str:
        if "click[buy now]" in admissible:
            return self._act_on_product()
        if "click[next >]" in admissible:
            return self._pick(observation)
        if _is_sub_page(admissible):
            return "click[< prev]"
        return f"search[{self._query()}]"

    def _query(self) -> str:
        """Return a query: the description of the wanted product, followed by the wanted option values in half of the searches."""
        values = " ".join(self._task.options.values()) if self._random.random() < 0.5 else ""
        return re.sub(r"[\[\]]", " ", f"{self._task.product} {values}".strip())

    def _pick(self, observation: str) -> str:
        """Return a click on the next affordable result that was not visited yet.

        Near the turn limit, or if there is no such result, return a click on the best visited result of the page.
        """
        listed = _read_results(observation)
        self._listed = frozenset(listed)
        affordable = (asin for asin, price in listed.items() if price <= self._task.limit)
        fresh = [asin for asin in affordable if asin not in self._visited]
        if fresh and self._left > self._turns_to_buy() + 3:
            return f"click[{fresh[0]}]"
        known = [asin for asin in listed if asin in self._visited]
        if known:
            self._settled = True
            return f"click[{max(known, key=self._value)}]"
        return f"click[{next(iter(fresh or listed))}]" if listed else "click[back to search]"

    def _act_on_product(self) -> str:
        """Return the action on a product's page: open its features, go back, choose an option, or buy."""
        visited, wanted = self._visited[self._current], self._wanted()
        if not self._settled:
            spare = self._left - self._turns_to_buy()
            has_options = set(wanted) <= visited.labels
            fits = has_options and self._task.terms <= visited.terms
            if has_options and not fits and not visited.read and spare > 2:
                return "click[features]"
            if not fits and spare > 4:
                return "click[< prev]"
        missing = (value for value in wanted if value in visited.labels - self._clicked)
        return next((f"click[{value}]" for value in missing), "click[buy now]")

    def _wanted(self) -> list[str]:
        return list(self._task.options.values())

    def _turns_to_buy(self) -> int:
        return len(self._task.options) + 1

    def _value(self, asin: str) -> int:
        visited = self._visited[asin]
        return len(self._task.terms & visited.terms) + 2 * len(visited.labels & set(self._wanted()))


def _is_sub_page(admissible: Sequence[str]) -> bool:
    return set(admissible) == {"click[back to search]", "click[< prev]"}


def _read_results(observation: str) -> dict[str, float]:
    """Return the lowest price of each product on a results page by lower-cased ASIN, in the order of the page."""
    texts = observation.split(pages.SEPARATOR)
    start = texts.index(pages.NEXT) + 1 if pages.NEXT in texts else len(texts)
    entries = texts[start:]
    prices: dict[str, float] = {}
    for asin, price in zip(entries[::3], entries[2::3], strict=False):
        lowest = _LOWEST_PRICE.match(price)
        prices[asin.lower()] = float(lowest.group(1)) if lowest else float("inf")
    return prices
