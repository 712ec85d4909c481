"""A buyer that knows what a player sees: the instruction, the pages so far, and what can be clicked."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from trial_envs.webshop import pages
from trial_envs.webshop.analyser import index_terms

_PRICE = re.compile(r", and price lower than (\d+\.\d\d) dollars$")
_OPTIONS = re.compile(r" with (?=(?:(?! with )[^:,]){1,40}: )")
_LOWEST_PRICE = re.compile(r"\$(\d+(?:\.\d+)?)")


@dataclass(frozen=True, slots=True)
class Errand:
    """What an instruction asks for, in the player's words.

    Attributes:
        thing: the product and its properties.
        options: option name -> value.
        limit: the price must not exceed it; infinite if none is named.
    """

    thing: str
    options: dict[str, str]
    limit: float

    @property
    def terms(self) -> frozenset[str]:
        """The stems of the words for the thing."""
        return frozenset(index_terms(self.thing.lower()))


def read_task(sentence: str) -> Errand:
    """Reads an instruction as the shop words it; of any other sentence, all of it is the thing."""
    text = sentence.strip()
    price = _PRICE.search(text)
    if price:
        text = text[: price.start()]
    thing, *rest = _OPTIONS.split(text, maxsplit=1)
    pairs = (part.partition(": ") for part in rest[0].split(", and ")) if rest else ()
    options = {name: value for name, separator, value in pairs if separator}
    return Errand(thing.removeprefix("Find me "), options, float(price.group(1)) if price else float("inf"))


@dataclass(slots=True)
class _Impression:
    """What is known of a product that was looked at."""

    terms: set[str] = field(default_factory=set)
    labels: frozenset[str] = frozenset()
    read: bool = False


class ExplorerOracle:
    """Searches for the thing, looks at affordable results in turn, reads features where the title leaves doubts.

    It buys the first product that has everything that was asked for, and when turns run short the best that it saw.
    """

    def reset(self, task: str, observation: str, seed: int, max_turns: int = 15) -> None:
        """Starts an episode; ``task`` is ``info["task"]``."""
        self._errand = read_task(task)
        self._random = random.Random(seed)
        self._left = max_turns
        self._last = ""
        self._current = ""
        self._clicked: set[str] = set()
        self._listed: frozenset[str] = frozenset()
        self._impressions: dict[str, _Impression] = {}
        self._settled = False

    def act(self, observation: str, admissible: Sequence[str]) -> str:
        """The next action."""
        self._notice(observation, admissible)
        self._last = self._choose(observation, admissible)
        self._left -= 1
        return self._last

    def carried_out(self, action: str) -> None:
        """Takes note that another action than the chosen one was carried out."""
        self._last = action

    def _notice(self, observation: str, admissible: Sequence[str]) -> None:
        label = self._last.removeprefix("click[").removesuffix("]")
        if "click[buy now]" not in admissible:
            if _is_sub_page(admissible) and self._current:
                self._look(observation).read = True
            return
        if label not in self._clicked and label in self._listed:
            self._current, self._clicked = label, set()
        elif f"click[{label}]" in admissible:
            self._clicked.add(label)
        labels = frozenset(action.removeprefix("click[").removesuffix("]") for action in admissible)
        self._look(observation).labels = labels

    def _look(self, observation: str) -> _Impression:
        """Adds what a page says, the instruction apart, to the impression of the current product."""
        impression = self._impressions.setdefault(self._current, _Impression())
        impression.terms |= set(index_terms(observation.split(pages.PREVIOUS, 1)[-1].lower()))
        return impression

    def _choose(self, observation: str, admissible: Sequence[str]) -> str:
        if "click[buy now]" in admissible:
            return self._judge()
        if "click[next >]" in admissible:
            return self._pick(observation)
        if _is_sub_page(admissible):
            return "click[< prev]"
        return f"search[{self._query()}]"

    def _query(self) -> str:
        """The thing, in half of the games with the wanted values."""
        values = " ".join(self._errand.options.values()) if self._random.random() < 0.5 else ""
        return re.sub(r"[\[\]]", " ", f"{self._errand.thing} {values}".strip())

    def _pick(self, observation: str) -> str:
        """The next affordable result that was not looked at; the best of those that were, when it is time to buy."""
        listed = _read_results(observation)
        self._listed = frozenset(listed)
        affordable = (asin for asin, price in listed.items() if price <= self._errand.limit)
        fresh = [asin for asin in affordable if asin not in self._impressions]
        if fresh and self._left > self._turns_to_buy() + 3:
            return f"click[{fresh[0]}]"
        known = [asin for asin in listed if asin in self._impressions]
        if known:
            self._settled = True
            return f"click[{max(known, key=self._value)}]"
        return f"click[{next(iter(fresh or listed))}]" if listed else "click[back to search]"

    def _judge(self) -> str:
        """On a product's page: read on, leave, choose an option, or buy."""
        impression, wanted = self._impressions[self._current], self._wanted()
        if not self._settled:
            spare = self._left - self._turns_to_buy()
            has_options = set(wanted) <= impression.labels
            fits = has_options and self._errand.terms <= impression.terms
            if has_options and not fits and not impression.read and spare > 2:
                return "click[features]"
            if not fits and spare > 4:
                return "click[< prev]"
        missing = (value for value in wanted if value in impression.labels - self._clicked)
        return next((f"click[{value}]" for value in missing), "click[buy now]")

    def _wanted(self) -> list[str]:
        return list(self._errand.options.values())

    def _turns_to_buy(self) -> int:
        return len(self._errand.options) + 1

    def _value(self, asin: str) -> int:
        impression = self._impressions[asin]
        return len(self._errand.terms & impression.terms) + 2 * len(impression.labels & set(self._wanted()))


def _is_sub_page(admissible: Sequence[str]) -> bool:
    return set(admissible) == {"click[back to search]", "click[< prev]"}


def _read_results(observation: str) -> dict[str, float]:
    """Lower-cased asin -> lowest price, in the order of a results page."""
    texts = observation.split(pages.SEPARATOR)
    start = texts.index(pages.NEXT) + 1 if pages.NEXT in texts else len(texts)
    entries = texts[start:]
    found: dict[str, float] = {}
    for asin, price in zip(entries[::3], entries[2::3], strict=False):
        lowest = _LOWEST_PRICE.match(price)
        found[asin.lower()] = float(lowest.group(1)) if lowest else float("inf")
    return found
