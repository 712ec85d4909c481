"""The shops of an environment as one sequence of goals: an imported shop, or generated ones whose goals take turns."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from trial_envs.core.levels import require_whole
from trial_envs.webshop.catalogue import Catalogue
from trial_envs.webshop.generator import ShopSetting, open_generated

SEED_STEP = 10_000_019
"""Between the seeds of the shops of one environment, so that environments with neighbouring seeds share none."""


class ShopSet:
    """Shops that are opened when one of their goals is asked for.

    Goal ``n`` of all is goal ``n // N`` of shop ``n % N`` of ``N``.

    Args:
        openers: of each shop.
        num_goals: of all shops together.
    """

    def __init__(self, openers: Sequence[Callable[[], Catalogue]], num_goals: int) -> None:
        self.num_goals = num_goals
        self._openers = openers
        self._open: dict[int, Catalogue] = {}

    def locate(self, number: int) -> tuple[Catalogue, int]:
        """The shop of a goal, and the goal's number there."""
        goal, shop = divmod(number, len(self._openers))
        if shop not in self._open:
            self._open[shop] = self._openers[shop]()
        return self._open[shop], goal


def imported(catalogue: Catalogue) -> ShopSet:
    """One shop that is open."""
    return ShopSet([lambda: catalogue], catalogue.num_goals)


def generated(setting: ShopSetting, num_shops: int) -> ShopSet:
    """Generated shops.

    Args:
        setting: of the first one; ``num_goals`` is that of all together.
        num_shops: how many, or as many as there are goals if those are fewer.

    Raises:
        GeneratorSettingError: ``num_shops`` is below 1.
    """
    require_whole(1, num_shops=num_shops)
    count = min(num_shops, setting.num_goals)

    def opener(index: int) -> Callable[[], Catalogue]:
        goals = math.ceil((setting.num_goals - index) / count)
        return lambda: open_generated(replace(setting, num_goals=goals, seed=setting.seed + SEED_STEP * index))

    return ShopSet([opener(index) for index in range(count)], setting.num_goals)
