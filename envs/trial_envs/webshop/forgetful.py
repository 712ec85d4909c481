"""A scripted policy for the short pages of generated shops at the level ``tiny``; it remembers only the last two pages."""

from __future__ import annotations

import random
from collections.abc import Sequence

from trial_envs.text_index.analyser import index_terms
from trial_envs.webshop import pages
from trial_envs.webshop.explorer import read_task


class ForgetfulExplorer:
    """Searches for the product, opens a result that may match, reads its features if the main page lacks required terms, and buys.

    The policy does not remember which products it has seen: on the results page it skips only the product from which it
    returns, and may open any other product again. A model that sees the task, the last action and the pages before and after
    this action can therefore infer from which actions the policy draws.
    """

    def reset(self, task: str, observation: str, seed: int) -> None:
        """Start an episode; ``task`` is the environment's ``info["task"]``."""
        self._task = read_task(task)
        self._random = random.Random(seed)
        self._last = ""
        self._shown = ""

    def act(self, observation: str, admissible: Sequence[str]) -> str:
        """Return the next action, an admissible action or a search."""
        options = self.options(observation, admissible)
        self._last = options[0] if len(options) == 1 else self._random.choice(options)
        self._shown = observation
        return self._last

    def options(self, observation: str, admissible: Sequence[str]) -> list[str]:
        """Return the actions from which :meth:`act` draws in this turn: one action, or clicks on equally promising results."""
        if "click[buy now]" in admissible:
            return [self._on_product(observation, admissible)]
        if "click[next >]" in admissible:
            return self._on_results(observation)
        if "click[< prev]" in admissible:
            return ["click[< prev]"]
        return [f"search[{self._task.product}]"]

    def carried_out(self, action: str) -> None:
        """Record that ``action`` was carried out instead of the action returned by :meth:`act`."""
        self._last = action

    def _on_results(self, observation: str) -> list[str]:
        """Return clicks on the results whose titles lack the fewest terms of the wanted product's description.

        The product on the previous page is skipped. If no other product is listed, return a click on "Back to Search".
        """
        texts = observation.split(pages.SEPARATOR)
        entries = texts[texts.index(pages.NEXT) + 1 :]
        listed = [
            (len(self._missing(title)), f"click[{asin.lower()}]")
            for asin, title in zip(entries[::3], entries[1::3], strict=False)
            if f"{pages.SEPARATOR}{title}{pages.SEPARATOR}Price: " not in self._shown
        ]
        fewest = min((missing for missing, _ in listed), default=0)
        return [action for missing, action in listed if missing == fewest] or ["click[back to search]"]

    def _on_product(self, observation: str, admissible: Sequence[str]) -> str:
        wanted = [f"click[{value}]" for value in self._task.options.values()]
        if not set(wanted) <= set(admissible):
            return "click[< prev]"
        # Pages do not show which option is chosen, but the last action does.
        if self._last in wanted:
            return next((action for action in wanted[wanted.index(self._last) + 1 :]), "click[buy now]")
        missing = self._missing(observation.rpartition(pages.PREVIOUS)[2])
        if missing and self._last == "click[< prev]" and pages.BUY not in self._shown:
            missing -= set(index_terms(self._shown.rpartition(pages.PREVIOUS)[2].lower()))
            return "click[< prev]" if missing else next(iter(wanted), "click[buy now]")
        return "click[features]" if missing else next(iter(wanted), "click[buy now]")

    def _missing(self, text: str) -> set[str]:
        """Return the index terms of the wanted product's description that a text does not have."""
        return set(self._task.terms).difference(index_terms(text.lower()))
